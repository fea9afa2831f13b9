"""Model fixtures that many tests share; each is built or downloaded once per session.

The process of pytest that only distributes tests imports this file, too: whatever imports torch is
imported where it is used.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Triton's functions are made for its interpreter or its compiler when they are imported, and torch
# may import them.
os.environ["TRITON_INTERPRET"] = "1"

import pytest
from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from specdec.text.tokenizer import Tokenizer

SERVICE_TESTS = "tests/e2e/"

# Modules and tests live as long as the process: looking for garbage among them takes a fifth of the
# time of pytest's collection.
gc.disable()

# A shell starts background jobs with SIGINT ignored, and nohup ignores SIGHUP; processes started by
# tests inherit both.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class FilesSideBySide(LoadScopeScheduling):
    """Gives each worker process whole files, since the tests of a file share fixtures.

    The files that run the real service go to one process, so that one service runs at a time.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return SERVICE_TESTS if path.startswith(SERVICE_TESTS) else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesSideBySide:
    return FilesSideBySide(config, log)


def pytest_collection() -> None:
    """Let an example of hypothesis take more than 200 ms, which it may on a busy machine."""
    from hypothesis import settings

    settings.register_profile("tests", deadline=None)
    settings.load_profile("tests")


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None]:
    """Make no more than one test of those of a function that the expression of -m leaves out.

    They are two fifths of all, and each process would make them before pytest deselects them. Of
    other expressions than `not slow and not ...` all tests are made.
    """
    yield
    expression = metafunc.config.getoption("markexpr")
    left_out = set() if " or " in expression else {*expression.split(" and ")}
    kept = [
        call
        for call in metafunc._calls
        if left_out.isdisjoint(
            f"not {mark.name}" for mark in (*call.marks, *metafunc.definition.iter_markers())
        )
    ]
    metafunc._calls = kept or metafunc._calls[:1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of the real service first: they take longest, and one process runs them all."""
    items.sort(key=lambda item: not item.nodeid.startswith(SERVICE_TESTS))


def pytest_collection_finish() -> None:
    """Exempt modules and collected tests from garbage collection, which many tests cause.

    A collection takes half a second with them. For each phase of a test pytest adds a handler to
    all loggers that do not propagate, most of them torch's; its handler of the root is enough.
    """
    import torch

    # More threads do not speed up models this small, and wait for each other on busy cores.
    torch.set_num_threads(1)
    gc.freeze()
    gc.set_threshold(20_000)  # applications and configurations are made again for many tests
    gc.enable()
    for each in logging.root.manager.loggerDict.values():
        if isinstance(each, logging.Logger):
            each.propagate = True


@pytest.fixture(scope="module", autouse=True)
def without_garbage_of_others() -> None:
    """Exempt what the files before have imported and cached, too.

    A collection takes 0.13 s with it, and each capture of graphs for a device makes one.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with SmolLM2's proportions: 9 heads and 3 KV heads, not divisible by 2.

    Shared by the whole session: read it, never write to it.
    """
    from tests.specdec.tiny import tiny_llama_dir

    return tiny_llama_dir(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct, downloaded on first use. For tests marked `model`."""
    from specdec.models.resolve import resolve

    return resolve("smollm2-135m-instruct")


@pytest.fixture
def unjoined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the outputs of a request one by one to its reader, even if it is late.

    Only the last one may have joined the one before it.
    """
    from specdec.engine.requests import output_streams

    monkeypatch.setattr(output_streams, "_MAX_PARTS", 1)


@pytest.fixture(scope="session")
def llama2_like(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Return the tokenizer of `llama2_like_tokenizer`."""
    from specdec.text.tokenizer import Tokenizer
    from tests.specdec.tiny import llama2_like_tokenizer

    directory = tmp_path_factory.mktemp("llama2_like")
    llama2_like_tokenizer().save_pretrained(directory)
    return Tokenizer(directory)
