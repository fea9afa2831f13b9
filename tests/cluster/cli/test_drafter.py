"""`specdec drafter`, against a real server."""

import json

import pytest
from click.testing import CliRunner

from cluster.cli import main
from cluster.control.plane import ControlPlane
from cluster.control.store import ControlStore
from specdec.client import DrafterOrder, ReplicaReport
from tests.cluster.admin_service import Drafters, LocalHandle, running_admin_service


@pytest.fixture
def drafters():
    return Drafters()


@pytest.fixture
def command(tmp_path, drafters):
    handle = LocalHandle(ControlPlane(None, ControlStore(tmp_path, "tiny")))
    report = ReplicaReport("r1", is_ready=True)
    with running_admin_service(handle, report, drafters=drafters) as address:
        yield lambda *flags: CliRunner().invoke(
            main.main, ["drafter", *flags, "--address", address]
        )


def test_list(command):
    result = command("list")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "replica r1: 1 rolled back",
        "version  state        drafts  first accepted  acceptance length  head",
        "1        ready        100     60.0%           2.20               head",
        "2        rolled_back  0                                          other",
        "",
        "replica r2: version is 7; it must be 1",
    ]
    replicas = json.loads(command("list", "--json").stdout)["replicas"]
    assert replicas[0]["versions"][0]["speculation"]["num_drafts"] == 100


@pytest.mark.parametrize(
    ("flags", "order"),
    [
        (["load", "org/head"], DrafterOrder(path="org/head")),
        (["use", "2", "--replica", "r1"], DrafterOrder(version=2, replica_id="r1")),
        (["pin"], DrafterOrder(is_pinned=True)),
        (["unpin"], DrafterOrder(is_pinned=False)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_orders(command, drafters, flags, order):
    result, fault = command(*flags), ""
    if not order.replica_id:
        fault = "1 of 2 replicas have not confirmed the order (r2: version is 7; it must be 1)"
    assert (result.exit_code, result.stderr) == ((1, f"error: {fault}\n") if fault else (0, ""))
    assert drafters.orders == [order]
    assert ("pinned" in result.stdout) == bool(order.is_pinned)


def test_a_relative_path_is_that_of_the_command(command, drafters, tmp_path, monkeypatch):
    (tmp_path / "run" / "head").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    command("load", "run/head")
    assert drafters.orders == [DrafterOrder(path=str((tmp_path / "run/head").resolve()))]


def test_a_refused_order_is_one_line(command):
    result = command("use", "7")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: version is 7; it must be one of 1, 2\n"
