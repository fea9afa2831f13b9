# Modules: cluster.cli.tables, specdec.client.admin_client, specdec.client.codec.admin
"""The admin commands, against a real server."""

import getpass
import json
import socket
from dataclasses import replace

import pytest
from click.testing import CliRunner

from cluster.api.base.authentication import ApiKey, ApiKeys
from cluster.cli import main
from cluster.cli.admin import status as status_command
from cluster.control.plane import ControlPlane
from cluster.control.store import ControlStore
from protos.specdec.v1 import admin_pb2 as pb
from specdec.client import Counts, ReplicaReport
from specdec.types.control import SpeculationControl
from specdec.types.reports.stats import SpeculationStats
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
    num_chosen_tokens=3,
    decision_reason="goodput",
    counts=Counts(speculation=SpeculationStats(10, 30, 20)),
)


@pytest.fixture
def handle(tmp_path):
    return LocalHandle(ControlPlane(CONFIGURED, ControlStore(tmp_path, "tiny")))


@pytest.fixture
def command(handle):
    with running_admin_service(handle, REPORT) as address:
        yield lambda *flags: CliRunner().invoke(main.main, [*flags, "--address", address])


@pytest.fixture
def speculation(command):
    return lambda *flags: command("speculation", *flags)


def test_get_without_overrides(speculation):
    result = speculation("get")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "mode                    auto  as configured",
        "threshold               32    as configured",
        "num_speculative_tokens  3     as configured",
        "method                  all   as configured",
        "allow_request_override  yes   as configured",
        "allowed_verifiers       all   as configured",
        "never changed",
    ]


def test_set_shows_the_effective_values_and_the_operator(speculation):
    result = speculation("set", "--mode", "off", "--threshold", "8", "--reason", "a test")
    *values, last = result.stdout.splitlines()
    assert values == [
        "mode                    off  set by an operator; configured: auto",
        "threshold               8    set by an operator; configured: 32",
        "num_speculative_tokens  3    as configured",
        "method                  all  as configured",
        "allow_request_override  yes  as configured",
        "allowed_verifiers       all  as configured",
    ]
    assert last.startswith("version 1, 20")
    assert last.endswith(f" UTC by {getpass.getuser()}@{socket.gethostname()}: a test")
    assert speculation("get").stdout == result.stdout


def test_reset_and_versions(speculation):
    speculation("set", "--num-speculative-tokens", "5")
    result = speculation("set", "--reset", "--expected-version", "0")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: expected_version is 0; the current version is 1\n"
    result = speculation("set", "--reset", "--expected-version", "1")
    assert result.stdout.count("as configured") == 6


def test_json(speculation):
    state = json.loads(speculation("set", "--mode", "on", "--json").stdout)
    in_force = state["in_force"]
    assert (in_force["mode"], in_force["threshold"], in_force["method"]) == ("on", 32, None)
    assert set(in_force) == {each.name for each in pb.SpeculationValues.DESCRIPTOR.fields}
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


@pytest.mark.parametrize(
    ("is_up", "shown"),
    [
        (None, "on (version 0)"),
        (True, "on (version 0)"),
        (False, "on (version 0), draft worker unavailable"),
    ],
)
def test_status_shows_an_unavailable_draft_worker(handle, is_up, shown):
    with running_admin_service(handle, replace(REPORT, is_draft_worker_up=is_up)) as address:
        result = CliRunner().invoke(status_command, ["--address", address])
    assert result.stdout.splitlines()[1].endswith(f"  {shown}")


def test_status_as_json(command):
    status = json.loads(command("status", "--json").stdout)
    [replica] = status["replicas"]
    assert replica["report"]["num_decoding"] == 4
    assert replica["report"]["counts"]["speculation"]["num_accepted_tokens"] == 20
    assert replica["report"].keys().isdisjoint(("num_kv_blocks", "at_s", "memory"))
    assert replica["report"]["counts"].keys().isdisjoint(("num_preemptions", "ended"))
    assert status["speculation"]["version"] == 0
    assert status["num_lost_replicas"] == 0


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--threshold", "-1"], "threshold is -1; it must be a whole number from 0 to 4096"),
        (["--num-speculative-tokens", "33"], "num_speculative_tokens is 33; it must be a whole"),
    ],
)
def test_an_invalid_change(speculation, flags, line):
    result = speculation("set", *flags)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: {line}")
    assert speculation("get").stdout.endswith("never changed\n")


def test_a_mode_that_does_not_exist_is_wrong_usage(speculation):
    assert speculation("set", "--mode", "maybe").exit_code == 2


def test_a_change_of_nothing_is_wrong_usage(speculation):
    result = speculation("set", "--reason", "none")
    assert result.exit_code == 2
    assert "Nothing to change: give a setting, such as --mode off." in result.stderr
    assert speculation("set", "--no-allow-request-override").exit_code == 0
    assert speculation("set", "--reset").exit_code == 0


def test_an_unreachable_service():
    result = CliRunner().invoke(main.main, ["status", "--address", "127.0.0.1:1"])
    assert result.exit_code == 1
    assert (
        result.stderr
        == "error: no service answers at 127.0.0.1:1; start one with `specdec serve`\n"
    )


def test_single_and_repeated_flags(speculation):
    flags = ["--rule", "0:2", "--rule", "20:off", "--ttl", "3600", "--no-allow-request-override"]
    flags += ["--allowed-verifier", "coupled", "--allowed-verifier", "block"]
    lines = speculation("set", *flags).stdout.splitlines()
    assert lines[2] == "num_speculative_tokens  2              by a rule; configured: 3"
    assert lines[4] == "allow_request_override  no             set by an operator; configured: yes"
    assert lines[5] == "allowed_verifiers       coupled,block  set by an operator; configured: all"
    assert lines[6] == "from 0 requests/s: num_speculative_tokens 2 (active)"
    assert lines[7] == "from 20 requests/s: mode off"
    assert lines[9].startswith("until 20")
    assert "requests/s" not in speculation("set", "--no-rules").stdout


@pytest.mark.parametrize("text", ["off", "x:off", "5:maybe", "5:"])
def test_an_invalid_rule(speculation, text):
    result = speculation("set", "--rule", text)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: rule is {text!r}; it must be RPS:MODE or RPS:NUMBER")


def test_the_reset_command(speculation):
    speculation("set", "--mode", "off")
    result = speculation("reset", "--reason", "over", "--expected-version", "1")
    assert result.stdout.count("as configured") == 6
    assert result.stdout.rstrip().endswith(": over")


def test_the_audit_log(speculation):
    assert speculation("log").stdout == "never changed\n"
    speculation("set", "--mode", "off", "--reason", "load test")
    speculation("reset")
    newest, oldest = speculation("log").stdout.splitlines()
    assert newest.startswith("2 ")
    assert '{"reset": true}' in newest
    assert oldest.endswith('{"mode": "off"}  load test')
    assert [each["version"] for each in json.loads(speculation("log", "--json").stdout)["entries"]]


def test_watching(command, speculation):
    command("status")
    lines = speculation("watch", "--count", "2", "--interval", "0.2").stdout.splitlines()
    assert len(lines) == 2
    assert "4 decoding  1 waiting  acceptance 67%  r1 k=3 (goodput)" in lines[0]
    as_json = speculation("watch", "--count", "1", "--json").stdout
    assert json.loads(as_json)["totals"]["speculation"]["num_drafts"] == 10


def test_the_token_comes_from_a_file_or_the_environment(handle, tmp_path, monkeypatch):
    token = "correct-horse-battery"
    path = tmp_path / "token"
    path.write_text(token + "\n")
    with running_admin_service(handle, REPORT, token) as address:
        command = ["speculation", "get", "--address", address]
        rejected = CliRunner().invoke(main.main, command)
        assert rejected.stderr.startswith("error: this call needs the admin token")
        assert "or $SPECDEC_ADMIN_TOKEN for operators' commands" in rejected.stderr
        assert CliRunner().invoke(main.main, [*command, "--token-file", str(path)]).exit_code == 0
        monkeypatch.setenv("SPECDEC_ADMIN_TOKEN", token)
        assert CliRunner().invoke(main.main, command).exit_code == 0


def test_without_a_token_the_api_key_is_sent(handle, monkeypatch):
    keys = ApiKeys([ApiKey("ann", "sk-battery-staple")])
    monkeypatch.delenv("SPECDEC_ADMIN_TOKEN", raising=False)
    monkeypatch.delenv("SPECDEC_API_KEY", raising=False)
    with running_admin_service(handle, REPORT, keys=keys) as address:
        command = ["speculation", "set", "--mode", "off", "--address", address]
        rejected = CliRunner().invoke(main.main, command)
        assert rejected.stderr.startswith("error: the API key is missing or unknown")
        monkeypatch.setenv("SPECDEC_API_KEY", "sk-battery-staple")
        assert CliRunner().invoke(main.main, command).exit_code == 0


def test_profile(command):
    result = command("profile", "--num-steps", "7")
    assert (result.exit_code, result.stderr) == (0, "")
    heading, _, *lines = result.stdout.splitlines()
    assert heading == "replica r1, 2.5 s"
    assert lines == [
        "target, rank 0: 7 steps, /traces/t.json.gz",
        "operation  calls  self ms  total ms  device ms",
        "step       7      1.50     20.25     0.00",
        "aten::mm   70     0.50     0.50      12.00",
        "",
        "draft model, rank 0: 3 steps, no trace: the trace is larger than 5 bytes",
    ]
    report = json.loads(command("profile", "--replica", "r2", "--json").stdout)
    assert (report["replica_id"], report["workers"][0]["num_steps"]) == ("r2", 10)


def test_a_profile_of_no_steps_is_rejected(command):
    result = command("profile", "--num-steps", "0")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: num_steps is 0; it must be from 1 to 100\n"
