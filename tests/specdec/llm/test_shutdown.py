"""The end of an `LLM`: threads, processes and memory that it leaves."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import warnings
import weakref

import psutil
import pytest

from specdec import LLM, AsyncLLM, SamplingParams, StructuredOutput
from specdec.types.errors import NotReadyError
from tests.specdec.llm.models import arguments, metrics_of
from tests.specdec.llm.test_llm import GREEDY, Bar


@pytest.fixture(scope="module")
def llm(tiny_model_dir):
    with LLM(**arguments(tiny_model_dir)) as llm:
        yield llm


def num_threads():
    return sum(thread.name in ("llm", "engine") for thread in threading.enumerate())


def child_processes():
    """Return the child processes, among them those that earlier tests have not ended yet."""
    return set(psutil.Process().children())


def test_threads_and_processes_end_with_shutdown_or_the_last_reference(tiny_model_dir):
    before, earlier = num_threads(), child_processes()
    llm = LLM(**arguments(tiny_model_dir))
    held = SamplingParams(max_tokens=8, structured_output=StructuredOutput(choice=("a", "b")))
    llm.generate("Ask", held, use_tqdm=False)
    own = child_processes() - earlier
    assert own, "no grammar was tried"
    assert num_threads() == before + 2
    llm.shutdown()
    llm.shutdown()
    assert num_threads() == before
    assert not child_processes() & own
    with pytest.raises(NotReadyError, match="shut down"):
        llm.generate("Ask", GREEDY, use_tqdm=False)
    llm = LLM(**arguments(tiny_model_dir))
    llm.generate("Ask", GREEDY, use_tqdm=False)
    del llm
    gc.collect()
    assert num_threads() == before


def test_shutdown_frees_the_models_and_keeps_the_metrics(tiny_model_dir):
    llm = LLM(**arguments(tiny_model_dir))
    llm.generate("Ask", GREEDY, use_tqdm=False)
    executor = llm._llm_engine._executor
    models = [weakref.ref(executor.target), weakref.ref(executor._draft_worker)]
    before = metrics_of(llm)
    llm.shutdown()
    del executor
    gc.collect()
    assert [model() for model in models] == [None, None]
    assert metrics_of(llm) == before
    for call in (
        lambda: llm.set_speculation(mode="off"),
        lambda: llm.generate([]),
        llm.drafter_versions,
        llm.list_loras,
    ):
        with pytest.raises(NotReadyError, match="shut down"):
            call()


def in_fork(call):
    """Return what a call returns in a forked process, or its NotReadyError, as a text."""
    reader, writer = os.pipe()
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        child = os.fork()
    if child == 0:
        try:
            signal.alarm(60)
            os.write(writer, str(call()).encode())
        except NotReadyError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text


def test_a_forked_process_is_refused_and_ends_nothing(llm):
    for call in (lambda: llm.generate([]), lambda: llm.set_speculation(mode="off")):
        assert f"belongs to process {os.getpid()}" in in_fork(call)
    assert in_fork(llm.shutdown) == "None"
    assert len(llm.generate("Ask", GREEDY, use_tqdm=False)) == 1


async def token_ids(llm):
    [output] = [each async for each in llm.generate("Ask", GREEDY, output_kind="final_only")]
    return output.outputs[0].token_ids


def test_a_forked_process_uses_a_model_whose_threads_have_not_started(tiny_model_dir):
    with AsyncLLM(**arguments(tiny_model_dir)) as llm:
        forked = in_fork(lambda: asyncio.run(token_ids(llm)))
        assert forked == str(asyncio.run(token_ids(llm)))
        for call in (token_ids, lambda llm: llm.abort("0")):
            assert "belongs to process" in in_fork(lambda call=call: asyncio.run(call(llm)))


def test_calls_after_the_end_of_an_async_llm_are_refused(tiny_model_dir):
    llm = AsyncLLM(**arguments(tiny_model_dir, speculative_config=None))
    llm.shutdown()
    with pytest.raises(NotReadyError, match="it has been shut down"):
        llm.set_speculation(mode="off")
    with pytest.raises(NotReadyError, match="it has been shut down"):
        asyncio.run(llm.abort("0"))


def test_shutdown_from_another_thread_fails_a_running_batch(tiny_model_dir):
    llm = LLM(**arguments(tiny_model_dir))
    long = SamplingParams(temperature=0, max_tokens=140, ignore_eos=True)
    each = [SamplingParams(temperature=0, max_tokens=1), *[long] * 30]
    closing = threading.Thread(target=llm.shutdown)

    class Closing(Bar):
        def update(self, count):
            if not closing.ident:
                closing.start()

    with pytest.raises(NotReadyError):
        llm.generate(["Ask"] * 31, each, use_tqdm=Closing)
    closing.join(timeout=30)


@pytest.mark.slow
def test_a_program_without_shutdown_exits(tiny_model_dir):
    """No thread or process keeps the interpreter alive, and nothing is printed at exit."""
    values = arguments(tiny_model_dir)
    code = f"from specdec import LLM; llm = LLM(**{values!r}); llm.generate('Ask', use_tqdm=False)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
