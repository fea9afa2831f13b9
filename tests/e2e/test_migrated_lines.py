"""Lines of docs/migration.md that start services, and the client calls after them, for real.

The models of a line are replaced by SmolLM2 and its small draft model; nothing else is changed but
the ports.
"""

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from specdec.client import AdminClient, SpeculationChange
from tests.e2e.conftest import running_service
from tests.shell_blocks import blocks_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(900)]

PAGE = Path(__file__).parents[2] / "docs" / "migration.md"
MODEL = "smollm2-135m-instruct"
DRAFT = "smollm2-135m-instruct-draft"
VLLM, VLLM_CURL, SGLANG, SGLANG_CURL = blocks_of(PAGE, "bash")
VLLM_PYTHON, SGLANG_PYTHON = blocks_of(PAGE, "python")
CASES = [
    pytest.param(VLLM.commands[0], VLLM_CURL, VLLM_PYTHON, "STANDALONE", 6, id="vllm"),
    pytest.param(SGLANG.commands[-2], SGLANG_CURL, SGLANG_PYTHON, "STANDALONE", 5, id="standalone"),
    pytest.param(SGLANG.commands[-1], SGLANG_CURL, SGLANG_PYTHON, "NGRAM", 16, id="ngram"),
]
"""A line, calls of its clients, and what /get_server_info then reports of speculation."""


def flags_of(line):
    """Return the flags of a line, with small models and without its address."""
    words = shlex.split(line)[2:]
    for option in ("--host", "--port"):
        if option in words:
            del words[words.index(option) : words.index(option) + 2]
    flags = []
    for word in words:
        if word.startswith("{"):
            keys = json.loads(word)
            flags.append(json.dumps({**keys, **({"model": DRAFT} if "model" in keys else {})}))
        elif "/" in word:
            flags.append(DRAFT if flags[-1:] == ["--speculative-draft-model-path"] else MODEL)
        else:
            flags.append(word)
    return flags


@pytest.mark.parametrize(("line", "curl", "program", "method", "num_tokens"), CASES)
def test_a_line_serves_and_its_clients_are_answered(
    line, curl, program, method, num_tokens, tmp_path
):
    with running_service(None, tmp_path / "log", *flags_of(line)) as service:
        for command in curl.commands:
            words = shlex.split(command.replace("http://127.0.0.1:8000", service.http_url))
            answer = json.loads(output_of(words))
            assert "error" not in answer, answer
        text = program.text.replace("http://127.0.0.1:8000", service.http_url)
        assert output_of([sys.executable, "-c", text]).strip()
        info = httpx.get(f"{service.http_url}/get_server_info", timeout=60).json()
        assert info["speculative_algorithm"] == method
        assert info["speculative_num_draft_tokens"] == num_tokens
        with AdminClient(service.grpc_address) as admin:  # whatever the policy expects to pay
            admin.set_speculation(SpeculationChange(mode="on"))
        wait_until(lambda: num_verified_drafts(service) > 0)


def wait_until(holds):
    """Wait for a change to be in force, which takes up to a second on an idle machine."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def output_of(command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def num_verified_drafts(service):
    """Generate a text that every method drafts for; return its number of verified drafts."""
    body = {
        "text": "1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3,",
        "sampling_params": {"temperature": 0, "max_new_tokens": 64},
    }
    answer = httpx.post(f"{service.http_url}/generate", json=body, timeout=60).json()
    return answer["meta_info"]["spec_verify_ct"]
