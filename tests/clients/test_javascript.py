"""Tests of the JavaScript example of docs/clients.md against the real service."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from specdec.client import Client
from specdec.types.sampling.sampling_params import SamplingParams
from tests.e2e.conftest import running_service

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "clients" / "javascript"
SCRIPT = "generate_stream.js"
PROMPT = "Once upon a time"
KEY = "sk-correct-horse"


def test_the_page_shows_the_tested_file():
    page = (ROOT / "docs" / "clients.md").read_text()
    [shown] = re.findall(r"```javascript\n(.*?)```", page, re.DOTALL)
    assert shown == (FOLDER / SCRIPT).read_text()


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """Return the path of the script, installed with the packages of its lock file."""
    if not (shutil.which("npm") and shutil.which("node")):
        pytest.skip("needs node and npm")
    folder = tmp_path_factory.mktemp("javascript")
    for name in (SCRIPT, "package.json", "package-lock.json"):
        shutil.copy(FOLDER / name, folder)
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    subprocess.run(command, cwd=folder, check=True, timeout=200)
    return folder / SCRIPT


def run(script, service, **environment):
    command = ["node", script, service.grpc_address, ROOT / "protos", PROMPT]
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)


@pytest.mark.slow
@pytest.mark.e2e
def test_javascript_streams_the_same_text_as_python(script, tiny_model_dir, tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"[{{name: ann, key: {KEY}}}]")
    flags = ["--max-model-len", "256", "--api-key-file", str(keys)]
    with running_service(tiny_model_dir, tmp_path / "log", *flags) as service:
        streamed = run(script, service, SPECDEC_API_KEY=KEY)
        refused = run(script, service, SPECDEC_API_KEY="sk-wrong-key")
        with Client(service.grpc_address, api_key=KEY) as client:
            params = SamplingParams(temperature=0.8, seed=7, max_tokens=64)
            expected = client.generate(PROMPT, params)
    assert (streamed.returncode, streamed.stdout) == (0, expected.text), streamed.stderr
    assert re.search(r"\d+ of \d+ draft tokens accepted", streamed.stderr)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("UNAUTHENTICATED: the API key is missing or unknown")
