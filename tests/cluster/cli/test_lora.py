"""`specdec lora`, against a real server."""

import json

import pytest
from click.testing import CliRunner

from cluster.cli import main
from cluster.control.plane import ControlPlane
from cluster.control.store import ControlStore
from specdec.client import AdapterOrder, ReplicaReport
from tests.cluster.admin_service import Adapters, LocalHandle, running_admin_service


@pytest.fixture
def adapters():
    return Adapters()


@pytest.fixture
def command(tmp_path, adapters):
    handle = LocalHandle(ControlPlane(None, ControlStore(tmp_path, "tiny")))
    report = ReplicaReport("r1", is_ready=True)
    with running_admin_service(handle, report, adapters=adapters) as address:
        yield lambda *flags: CliRunner().invoke(main.main, ["lora", *flags, "--address", address])


def test_list(command):
    result = command("list")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "replica r1: 1 adapter",
        "name  state  rank  requests  tokens  acceptance  source",
        "sql   ready  16    2         500     40.0%       org/sql",
        "",
        "replica r2: 0 adapters",
    ]
    replicas = json.loads(command("list", "--json").stdout)["replicas"]
    assert replicas[0]["adapters"][0]["speculation"]["num_drafts"] == 100


@pytest.mark.parametrize(
    ("flags", "order"),
    [
        (["load", "chat", "org/chat"], AdapterOrder.load("chat", "org/chat")),
        (
            ["load", "sql", "org/sql", "--replace", "--replica", "r1"],
            AdapterOrder.load("sql", "org/sql", replaces=True, replica_id="r1"),
        ),
        (
            ["load", "chat", "org/chat", "--draft-path", "org/draft"],
            AdapterOrder.load("chat", "org/chat", draft_path="org/draft"),
        ),
        (["load", "fast", "--draft-path", "org/d"], AdapterOrder.load("fast", draft_path="org/d")),
        (["unload", "sql"], AdapterOrder.unload("sql")),
        (["unload", "sql", "--replica", "r2"], AdapterOrder.unload("sql", replica_id="r2")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_orders(command, adapters, flags, order):
    result = command(*flags)
    assert (result.exit_code, result.stderr) == (0, "")
    assert adapters.orders == [order]


@pytest.mark.parametrize("flags", [["load", "chat", "org/chat"], ["unload", "sql"]])
def test_an_order_that_one_replica_refuses_fails(command, adapters, flags):
    adapters.fault = "no memory"
    result = command(*flags)
    assert (result.exit_code, "replica r2: no memory" in result.stdout) == (1, True)
    assert result.stderr == (
        "error: 1 of 2 replicas have not confirmed the order (r2: no memory)\n"
    )
    assert command(*flags, "--replica", "r1").exit_code == 0


def test_a_relative_path_becomes_absolute(command, adapters, tmp_path, monkeypatch):
    (tmp_path / "adapter").mkdir()
    monkeypatch.chdir(tmp_path)
    result = command("load", "chat", "adapter", "--draft-path", "adapter")
    assert result.exit_code == 0
    absolute = str(tmp_path.resolve() / "adapter")
    assert (adapters.orders[0].path, adapters.orders[0].draft_path) == (absolute, absolute)
    columns, sql, chat = result.stdout.splitlines()[1:4]
    assert columns.split()[-3:] == ["source", "draft", "adapter"]
    assert sql.split()[-1] == "org/sql"
    assert chat.split()[-2:] == [absolute, absolute]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["load", "a b", "/a"], "name is 'a b'; it must be 1 to 256 letters"),
        (["load", "sql", "/a"], "a name that no loaded adapter has"),
        (["unload", "other"], "model 'other' is not served; served: 'sql'"),
    ],
)
def test_errors_are_one_line(command, flags, message):
    result = command(*flags)
    assert result.exit_code != 0
    assert message in result.stderr
    assert result.stderr.count("\n") <= 1
