"""The number of threads of torch: tests run on one, except tests of threads."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Set the number of threads of torch and the native kernels inside the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_started_by(call: Callable[[], object]) -> set[str]:
    """Call a function in a new thread; return the ids of the threads that it starts and keeps.

    The setting of torch reaches OpenMP in a thread with the first operation that needs it.
    """
    started = set[str]()

    def run() -> None:
        before = _ids_of_threads()
        call()
        started.update(_ids_of_threads() - before)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return started


def _ids_of_threads() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}
