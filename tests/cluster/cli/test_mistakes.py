# Modules: specdec.engine.models.preflight
"""Mistakes of users: each ends `specdec serve` with one line and exit code 2.

All but the last one do so before Ray starts.
"""

import re
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from itertools import chain
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.cli import serve as cli_serve
from cluster.serve.ray_session import RaySession
from specdec import LLM
from specdec.llm import llm_engine
from specdec.models import hub
from specdec.types.errors import ModelNotFoundError, SpecdecError
from tests.cluster.cli import mistakes_in_files, mistakes_in_settings
from tests.cluster.cli.conftest import run_cli, run_serve
from tests.cluster.cli.mistakes_in_files import MISTAKES, Place
from tests.e2e.conftest import free_ports
from tests.specdec.tiny import tiny_llama_dir

assert mistakes_in_settings, "it adds to the table"

MAX_S = 30.0
"""For one mistake, of which most take milliseconds on an idle machine."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Return the directories of models that mistakes start from."""
    root = tmp_path_factory.mktemp("sources")
    sharded = tiny_llama_dir(root / "sharded", sharded=True)
    narrow = tiny_llama_dir(root / "narrow", hidden=96, heads=6, vocab=400)
    return sharded, narrow


@pytest.fixture
def place(tiny_model_dir, sources, tmp_path):
    return Place(tiny_model_dir, *sources, tmp_path)


@pytest.fixture
def serve(monkeypatch, place, capfd):
    """Return a function that runs the command on free ports, as far as the start of Ray."""
    monkeypatch.setattr(cli_serve, "guarded", Mock(return_value=nullcontext()))
    monkeypatch.setattr(RaySession, "start", Mock(side_effect=AssertionError("Ray was started")))
    unreachable = ModelNotFoundError("the Hub cannot be reached")
    monkeypatch.setattr(hub, "fetch", Mock(side_effect=unreachable))
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(place.tmp / "cache"))

    def serve(*arguments):
        arguments = [str(each) for each in arguments]
        for flag, port in zip(("--grpc-port", "--http-port"), free_ports(2), strict=True):
            arguments += [] if flag in arguments else [flag, str(port)]
        return run_serve(capfd, *arguments)

    return serve


def test_there_are_40_mistakes():
    assert len(MISTAKES) >= 40


def fails_in_one_line(result, words):
    assert (result.exit_code, result.stdout) == (2, "")
    *lines, last = result.stderr.splitlines()
    assert last.startswith("error: ")
    assert re.search(words, last), last
    assert not re.search(r"Traceback|\w(Error|Exception)\b", last)
    assert not any("Ray" in line or "measuring" in line for line in lines)


@pytest.mark.parametrize("function", MISTAKES, ids=lambda function: function.__name__)
def test_a_mistake(function, place, serve):
    arguments, started_at = function(place), time.monotonic()
    result = serve(*arguments)
    assert time.monotonic() - started_at < MAX_S
    fails_in_one_line(result, MISTAKES[function])


def test_a_taken_port(place, serve):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = serve(place.tiny, "--http-port", port)
    words = rf"cannot listen on 127.0.0.1:{port} \(http_port\): address already in use"
    fails_in_one_line(result, words)


OF_MODELS = (
    mistakes_in_files.no_config,
    mistakes_in_files.another_architecture,
    mistakes_in_files.cut_weights,
    mistakes_in_files.a_missing_shard,
    mistakes_in_files.no_tokenizer,
    mistakes_in_files.a_cut_gguf,
)


@pytest.mark.parametrize("function", OF_MODELS, ids=lambda function: function.__name__)
def test_the_report_of_a_model_names_it_too(function, place, monkeypatch):
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(place.tmp / "cache"))
    [path] = function(place)
    result = run_cli("models", "show", str(path), "--kernels", "torch")
    assert result.exit_code == 2
    lines = [each for each in result.output.splitlines() if re.search(MISTAKES[function], each)]
    assert any(line.startswith(("error: ", "fault  ")) for line in lines)


@pytest.mark.parametrize("function", OF_MODELS, ids=lambda function: function.__name__)
def test_a_program_gets_the_same_line(function, place, monkeypatch):
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(place.tmp / "cache"))
    monkeypatch.setattr(llm_engine, "_make_executor", lambda *_: pytest.fail("a model was loaded"))
    [path] = function(place)
    with pytest.raises(SpecdecError, match=MISTAKES[function]):
        LLM(str(path))


@pytest.mark.slow
def test_a_fault_that_only_a_rank_finds_is_one_line(place):
    model = place.copy()
    weights = load_file(model / "model.safetensors")
    weights |= {f"model.layers.1.self_attn.{name}_scale": torch.zeros(1) for name in "kv"}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    ports = zip(("--grpc-port", "--http-port"), map(str, free_ports(2)), strict=True)
    flags = ("--device=cpu", "--kernels=torch", "--kv-cache-dtype=fp8", *chain(*ports))
    command = [sys.executable, "-m", "cluster", "serve", str(model), *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    *progress, last = result.stderr.splitlines()
    scale = "model.layers.1.self_attn.k_scale"
    assert last == f"error: {scale} is 0.0; it must be a positive number"
    known = "starting Ray$|loading |  still starting, |.* ray.serve .* has died"
    assert [line for line in progress if not re.match(known, line)] == []
