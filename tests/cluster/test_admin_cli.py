"""The operator's commands, on a real server."""

import getpass
import json
import socket

import pytest
from click.testing import CliRunner

from cluster import cli
from cluster.admin_cli import status as status_command
from cluster.control_plane import ControlPlane
from cluster.control_store import ControlStore
from specdec.client import ReplicaReport
from specdec.speculation import SpeculationControl
from specdec.stats import SpeculationStats
from tests.cluster.admin_service import LocalHandle, running_admin_service

CONFIGURED = SpeculationControl("auto", threshold=32, num_speculative_tokens=3)
REPORT = ReplicaReport(
    "r1",
    is_ready=True,
    num_running=5,
    num_waiting=1,
    num_decoding=4,
    kv_cache_usage=0.25,
    is_speculation_on=True,
    speculation_version=0,
    speculation=SpeculationStats(10, 30, 20),
)


@pytest.fixture
def handle(tmp_path):
    return LocalHandle(ControlPlane(CONFIGURED, ControlStore(tmp_path, "tiny")))


@pytest.fixture
def command(handle):
    with running_admin_service(handle, REPORT) as address:
        yield lambda *words: CliRunner().invoke(cli.main, [*words, "--address", address])


@pytest.fixture
def speculation(command):
    return lambda *words: command("speculation", *words)


def test_get_before_anyone_changed_anything(speculation):
    result = speculation("get")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "mode                    auto  as configured",
        "threshold               32    as configured",
        "num_speculative_tokens  3     as configured",
        "never changed",
    ]


def test_set_shows_what_is_in_force_and_who_did_it(speculation):
    result = speculation("set", "--mode", "off", "--threshold", "8", "--reason", "a test")
    *values, last = result.stdout.splitlines()
    assert values == [
        "mode                    off  set by an operator; configured: auto",
        "threshold               8    set by an operator; configured: 32",
        "num_speculative_tokens  3    as configured",
    ]
    assert last.startswith("version 1, 20")
    assert last.endswith(f" UTC by {getpass.getuser()}@{socket.gethostname()}: a test")
    assert speculation("get").stdout == result.stdout


def test_reset_and_versions(speculation):
    speculation("set", "--num-speculative-tokens", "5")
    result = speculation("set", "--reset", "--expected-version", "0")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: expected_version is 0; it must be 1, the present one\n"
    result = speculation("set", "--reset", "--expected-version", "1")
    assert result.stdout.count("as configured") == 3


def test_json(speculation):
    state = json.loads(speculation("set", "--mode", "on", "--json").stdout)
    assert state["in_force"] == {"mode": "on", "threshold": 32, "num_speculative_tokens": 3}
    assert state["configured"]["mode"] == "auto"
    assert (state["overridden"], state["version"]) == (["mode"], 1)
    assert state["updated_at"].endswith("+00:00")
    assert json.loads(speculation("get", "--json").stdout) == state


def test_status(command):
    result = command("status")
    assert (result.exit_code, result.stderr) == (0, "")
    heading, replica, empty, *state = result.stdout.splitlines()
    assert heading.split() == [
        *("replica", "state", "up", "running", "waiting", "decoding", "kv", "speculation")
    ]
    assert replica == "r1       ready  0s  5        1        4         25%  on (version 0)"
    assert (empty, state[-1]) == ("", "never changed")


def test_status_of_a_replica_that_is_not_ready(handle):
    loading = ReplicaReport("r1", is_ready=False, reason="the model is loading")
    with running_admin_service(handle, loading) as address:
        result = CliRunner().invoke(status_command, ["--address", address])
    assert "r1       not ready: the model is loading  0s" in result.stdout
    assert result.stdout.splitlines()[1].endswith("off")


def test_status_as_json(command):
    status = json.loads(command("status", "--json").stdout)
    [replica] = status["replicas"]
    assert replica["report"]["num_decoding"] == 4
    assert replica["report"]["speculation"]["num_accepted_tokens"] == 20
    assert status["speculation"]["version"] == 0
    assert status["num_lost_replicas"] == 0


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--threshold", "-1"], "threshold is -1; it must be a whole number from 0 to 4096"),
        (["--num-speculative-tokens", "33"], "num_speculative_tokens is 33; it must be a whole"),
        ([], "change is {}; it must be one of mode, threshold, num_speculative_tokens and reset"),
    ],
)
def test_a_change_that_cannot_be(speculation, words, line):
    result = speculation("set", *words)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: {line}")
    assert speculation("get").stdout.endswith("never changed\n")


def test_a_mode_that_does_not_exist_is_wrong_usage(speculation):
    assert speculation("set", "--mode", "maybe").exit_code == 2


def test_nobody_there():
    result = CliRunner().invoke(cli.main, ["status", "--address", "127.0.0.1:1"])
    assert result.exit_code == 1
    assert (
        result.stderr
        == "error: no service answers at 127.0.0.1:1; start one with `specdec serve`\n"
    )
