"""CPU scheduling where a service and its models share cores: threads of ranks, policies on Linux.

A thread that wakes up usually preempts one that has run for a while, as a model's threads always
have, and the model's other threads wait for the preempted one. Ray and what it runs, the Router
included, therefore use SCHED_BATCH, which does not preempt on wake-up; models use SCHED_OTHER.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

from specdec.config.hardware import available_cpus

_LOW_PRIORITY = 10
"""Nice value. Beside one busy thread of nice 0, such a thread gets a tenth of a core."""


@contextmanager
def starting_batch_work() -> Iterator[None]:
    """Run this thread as SCHED_BATCH, so that processes it starts meanwhile inherit the policy.

    Has no effect where the thread has another policy than SCHED_OTHER, which they then inherit.
    """
    if sys.platform != "linux" or _policy() != os.SCHED_OTHER:
        yield
        return
    try:
        _schedule(os.SCHED_BATCH)
        yield
    finally:
        _schedule(os.SCHED_OTHER)


def run_as_model() -> None:
    """Run this thread, and those it starts, as SCHED_OTHER where the process is SCHED_BATCH."""
    if sys.platform == "linux" and _policy() == os.SCHED_BATCH:
        _schedule(os.SCHED_OTHER)


def run_at_low_priority(function: Callable[[], object]) -> None:
    """Call a function in a new thread of low priority, and wait for it. Raises what it raises.

    A process could not raise the priority of its threads again, but a thread of it has its own.
    """
    with ThreadPoolExecutor(1, initializer=_lower_priority) as thread:
        thread.submit(function).result()


def _lower_priority() -> None:
    if sys.platform == "linux":  # where the nice value is an attribute of a thread
        with suppress(OSError):
            thread_id = threading.get_native_id()
            nice = os.getpriority(os.PRIO_PROCESS, thread_id)
            os.setpriority(os.PRIO_PROCESS, thread_id, max(nice, _LOW_PRIORITY))


def threads_per_worker(num_local_ranks: int, replicas_per_node: int = 1) -> int:
    """Return the threads of a rank: the ranks of a group share the cores, and so do replicas."""
    return max(1, available_cpus() // (num_local_ranks * replicas_per_node))


def _policy() -> int | None:
    with suppress(OSError):  # sandboxes may refuse these calls, which costs some speed
        return os.sched_getscheduler(0)
    return None


def _schedule(policy: int) -> None:
    with suppress(OSError):
        os.sched_setscheduler(0, policy, os.sched_param(0))
