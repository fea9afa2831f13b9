"""`specdec serve` with a draft head that does not fit: one line and exit code 2, before Ray starts.

The faults, and the words of their errors, are those of the readers' tests. Values of tensors are
read by the ranks: those faults are left out here.
"""

import json
import re
from contextlib import nullcontext
from unittest.mock import Mock

import pytest

from cluster.cli import serve as cli_serve
from cluster.serve.ray_session import RaySession
from tests.cluster.cli.conftest import run_serve
from tests.specdec.models.heads.driver import TARGET_SIZES, save
from tests.specdec.models.heads.test_malformed import FAULTS, base_of
from tests.specdec.tiny import tiny_llama_dir

METHODS = {"mlp": "mlp_speculator", "speculators": "eagle3"}
OF_SHAPES = [each for each in FAULTS if "maps" not in each[2]]


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory):
    return tiny_llama_dir(tmp_path_factory.mktemp("target"), **TARGET_SIZES)


@pytest.fixture
def serve(monkeypatch, target_dir, tmp_path, capfd):
    """Return a function that runs the command with a head in `tmp_path`; Ray must not start."""
    monkeypatch.setattr(cli_serve, "guarded", Mock(return_value=nullcontext()))
    monkeypatch.setattr(RaySession, "start", Mock(side_effect=AssertionError("Ray was started")))

    def run(method):
        speculation = json.dumps({"method": method, "model": str(tmp_path)})
        arguments = ["--model", str(target_dir), "--speculative-config", speculation]
        return run_serve(capfd, *arguments)

    return run


def test_there_are_40_faults():
    assert len(OF_SHAPES) >= 40


@pytest.mark.parametrize(
    ("kind", "fault", "words"),
    OF_SHAPES,
    ids=[f"{i}-{each[0]}" for i, each in enumerate(OF_SHAPES)],
)
def test_a_head_that_does_not_fit_ends_the_command(serve, tmp_path, kind, fault, words):
    save(tmp_path, *fault(*base_of(kind)))
    result = serve(METHODS.get(kind, kind))
    assert (result.exit_code, result.stdout) == (2, "")
    [line] = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert re.search(words, line), line


def test_a_head_of_another_method_is_named(serve, tmp_path):
    save(tmp_path, *base_of("eagle"))
    [line] = serve("medusa").stderr.splitlines()
    assert line.startswith("error: speculative_config.method is 'medusa'; it must be eagle: ")
