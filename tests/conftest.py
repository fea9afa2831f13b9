"""Model fixtures that many tests share; each is built or downloaded once per session."""

import os
import signal
from pathlib import Path

# Triton's functions are made for its interpreter or its compiler when they are imported, and torch
# may import them.
os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

from specdec.models.resolve import resolve
from tests.specdec.tiny import tiny_llama_dir

# More threads do not speed up models this small, and wait for each other on busy cores.
torch.set_num_threads(1)

# A shell starts background jobs with SIGINT ignored, and nohup ignores SIGHUP; processes started by
# tests inherit both.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with SmolLM2's proportions: 9 heads and 3 KV heads, not divisible by 2.

    Shared by the whole session: read it, never write to it.
    """
    return tiny_llama_dir(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct, downloaded on first use. For tests marked `model`."""
    return resolve("smollm2-135m-instruct")
