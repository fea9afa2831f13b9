"""`specdec-client` in an otherwise empty environment calls the real service."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.install import client_wheel
from tools.install.progress import size_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MAX_BYTES = 40e6
CALL = """
import sys
from specdec import SamplingParams
from specdec.client import AdminClient, Client

with Client(sys.argv[1]) as client:
    print(client.generate("Once", SamplingParams(max_tokens=5, ignore_eos=True)).usage)
    print(sum(len(each.token_ids) for each in client.generate_stream("Once")) > 0)
with AdminClient(sys.argv[1]) as admin:
    print(len(admin.status().replicas) == 1)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """The interpreter of an environment with the client alone."""
    folder = tmp_path_factory.mktemp("client")
    client_wheel.main([str(folder)])
    [wheel] = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    python = folder / "env" / "bin" / "python"
    before = size_of(str(folder / "env"))
    subprocess.run([python, "-m", "pip", "install", "--quiet", wheel], check=True)
    assert size_of(str(folder / "env")) - before < MAX_BYTES
    return python


def test_it_is_small_and_calls_the_service(python, embedded, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-c", CALL, embedded.grpc_address],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    usage, streamed, ready = done.stdout.splitlines()
    assert "completion_tokens=5" in usage
    assert (streamed, ready) == ("True", "True")
