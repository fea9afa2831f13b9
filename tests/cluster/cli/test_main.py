# Modules: cluster.cli.completion_result, cluster.cli.errors
"""The `specdec` command against a service in this process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from cluster.cli import completion_result
from cluster.cli import generate as generate_module
from specdec.client import StreamChunk
from specdec.types.reports.stats import SpeculationStats
from specdec.types.responses import Usage
from tests.cluster.cli.conftest import fails_with, run_cli
from tests.specdec.client.certificate import self_signed_certificate
from tests.specdec.client.fake_service import CHUNKS, FakeService, running

# generate


def test_help_groups_the_flags_into_sections():
    text = run_cli("generate", "--help").stdout
    headings = ["Options", "Length and", "Sampling", "Structured output", "Speculation", "Output"]
    positions = [text.index(f"\n{heading}") for heading in headings]
    assert positions == sorted(positions)
    assert "\nOutput:" not in run_cli("chat", "--help").stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate"],
        ["generate", "--timeout", "0", "Why?"],
        ["generate", "--top-k", "many", "Why?"],
        ["generate", "--logit-bias", "5", "Why?"],
        ["generate", "--logit-bias", "x=5", "Why?"],
        ["generate", "--verifier", "dice", "Why?"],
        ["generate", "--json-schema", "/no/such/file", "Why?"],
        ["chat", "--n", "2"],
        ["generate", "--tls-ca-file", "/no/such/file", "Why?"],
        ["serve", "--dtype", "float64"],
        ["serve", "--config", "/no/such/file"],
        ["dance"],
    ],
)
def test_wrong_usage(arguments):
    assert run_cli(*arguments).exit_code == 2


def test_an_unknown_command_names_the_nearest():
    result = run_cli("generat", "Why?")
    assert result.exit_code == 2
    assert "No such command 'generat'. Did you mean 'generate'?" in result.stderr
    assert "Did you mean" not in run_cli("xyz").stderr


def test_ctrl_c_is_quiet(generate, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_module, "receive", interrupt)
    result = generate("Why?")
    assert (result.exit_code, result.output) == (130, "")


def test_an_unexpected_error_is_one_line(generate, monkeypatch):
    def fail(*_):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(generate_module, "receive", fail)
    fails_with(
        generate("Why?"),
        "unexpected RuntimeError: two lines (set SPECDEC_DEBUG=1 to see the traceback)",
    )
    monkeypatch.setenv("SPECDEC_DEBUG", "1")
    assert isinstance(generate("Why?").exception, RuntimeError)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FileNotFoundError(2, "No such file", "/a"), "/a: No such file"),
        (PermissionError(13, "Permission denied", "/a", None, "/b"), "/a -> /b: Permission denied"),
        (
            ConnectionRefusedError(111, "Connection refused"),
            "unexpected ConnectionRefusedError: [Errno 111] Connection refused "
            "(set SPECDEC_DEBUG=1 to see the traceback)",
        ),
    ],
)
def test_an_error_of_the_system_names_its_files(error, message, generate, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(generate_module, "receive", fail)
    fails_with(generate("Why?"), message)


@pytest.mark.parametrize(
    "arguments", [["status", "--model", "\udcff"], ["lora", "unload", "\udcff"]], ids=lambda a: a[0]
)
def test_an_argument_that_is_not_utf_8_is_named(arguments):
    result = run_cli(*arguments, "--address", "127.0.0.1:1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: text is '\\udcff'; it must be valid Unicode\n"


def test_an_output_that_its_encoding_lacks_is_no_invalid_argument(monkeypatch):
    def fail(*_arguments, **_flags):
        "\u20ac".encode("latin-1")

    monkeypatch.setattr(generate_module, "Client", fail)
    result = run_cli("generate", "hi", "--address", "127.0.0.1:1")
    assert result.stderr.startswith("error: unexpected UnicodeEncodeError: 'latin-1' codec")


def test_timing_by_a_clock():
    chunks = [StreamChunk("r1", "", (), None, 42, None)]
    chunks += [
        StreamChunk(each.request_id, each.text, tuple(each.token_ids), None, None, None)
        for each in CHUNKS
    ]
    ticks = iter([10.0, 10.5, 12.0])
    shown = []
    timed = completion_result.receive(iter(chunks), shown.append, clock=lambda: next(ticks))
    assert shown == chunks
    assert (timed.first_token_s, timed.total_s) == (0.5, 2.0)


def test_a_request_without_drafts_has_no_acceptance():
    usage = Usage(4, 2, SpeculationStats())
    chunks = (StreamChunk("r1", "a", (1, 2), "length", 42, usage),)
    result = completion_result.CompletionResult(chunks, 0.5, 1.0)
    assert result.summary == "2 tokens, first after 0.50 s, 2.0 tokens/s, no drafts"


def modules_of(command):
    """Return the modules that the help of a command imports."""
    program = (
        "import sys; from cluster.cli.main import main; "
        f"main(['{command}', '--help'], standalone_mode=False); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("command", ["train", "train-data", "eval-drafter"])
def test_training_imports_neither_the_service_nor_its_client(command):
    loaded = modules_of(command)
    assert "specdec.config.llm" in loaded
    assert not loaded & {"ray", "grpc", "protos", "fastapi", "starlette", "yaml", "torch"}


def test_generate_imports_no_slow_modules():
    loaded = modules_of("generate")
    assert "cluster.cli.generate" in loaded
    assert not loaded & {"torch", "transformers", "numpy", "ray", "fastapi", "httpx"}
    assert "specdec.config.engine" not in loaded


# models, version


def test_version():
    assert run_cli("version").stdout == run_cli("--version").stdout
    assert run_cli("version").stdout.startswith("specdec ")
    version = json.loads(run_cli("version", "--json").stdout)["version"]
    assert run_cli("version").stdout == f"specdec {version}\n"


# tokenize


# errors


def test_with_json_errors_are_json(generate, service):
    result = generate("--json", "--temperature", "101", "Why?")
    assert (result.exit_code, result.stdout) == (1, "")
    assert json.loads(result.stderr)["error"] == {
        "kind": "INVALID_ARGUMENT",
        "message": "temperature is 101.0; it must be from 0 to 100",
        "field": "temperature",
        "limit": "from 0 to 100",
    }
    service.error = (grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
    error = json.loads(generate("--json", "Why?").stderr)["error"]
    assert error == {"kind": "RESOURCE_EXHAUSTED", "message": "the queue is full"}


def test_a_prompt_of_json_is_not_the_flag(generate, service):
    service.error = (grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
    fails_with(generate("--", "--json"), "the queue is full")


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_failed_tls_handshake_is_one_line(flags, tmp_path, monkeypatch):
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    (tmp_path / "ca.pem").write_bytes(self_signed_certificate("localhost")[1])
    with running(FakeService()) as service:
        command = ["-m", "cluster", "status", "--tls-ca-file", "ca.pem"]
        done = subprocess.run(
            [sys.executable, *command, "--address", service.address, *flags],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert f"the TLS handshake with {service.address} failed" in line
