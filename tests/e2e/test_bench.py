"""Tests of `specdec bench serve` against the real service, over each interface."""

import json

import pytest
from click.testing import CliRunner

from cluster.cli import main

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("backend", ["grpc", "openai-chat", "openai"])
def test_every_interface_completes_all_requests_under_load(embedded, backend):
    is_grpc = backend == "grpc"
    flags = ["--address", embedded.grpc_address] if is_grpc else ["--base-url", embedded.http_url]
    flags += ["--num-prompts", "6", "--random-input-len", "12", "--random-output-len", "8"]
    result = CliRunner().invoke(
        main.main,
        ["bench", "serve", "--backend", backend, *flags, "--max-concurrency", "3", "--json"],
    )
    assert result.exit_code == 0, result.output
    [run] = json.loads(result.stdout)["runs"]
    assert (run["completed"], run["failed"]) == (6, 0)
    assert 1 <= run["peak_concurrency"] <= 3, "how many are open at once is up to the machine"
    assert run["total_output_tokens"] == 6 * 8
    assert run["total_input_tokens"] >= 6 * 12
    assert 0 < run["mean_ttft_ms"] < run["mean_e2el_ms"]
    assert "spec_decode_num_drafts" in run, "how many there are is up to the model's text"
