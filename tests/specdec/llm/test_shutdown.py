"""The end of an `LLM`: threads, processes and memory that it leaves."""

import gc
import subprocess
import sys
import threading
import weakref

import psutil
import pytest

from specdec import LLM, SamplingParams, StructuredOutput
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
    with pytest.raises(NotReadyError, match="shut down"):
        llm.set_speculation(mode="off")


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
