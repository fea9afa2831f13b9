"""Which processes interrupt which, where a service and its models share cores (Linux).

A thread that wakes up usually takes the core from one that has run for a while, as a model's always
have; and whoever computes a layer together with that one waits too. Ray and what it hosts, the
Router too, are therefore scheduled as batch work, which waits for its turn, and models are not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def starting_batch_work() -> Iterator[None]:
    """Has processes that this thread starts meanwhile not interrupt others when they wake.

    Not where the thread has another policy than the usual one: theirs is then the same.
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
    """Has this thread, and those that it starts, be no batch work, though its process is."""
    if sys.platform == "linux" and _policy() == os.SCHED_BATCH:
        _schedule(os.SCHED_OTHER)


def _policy() -> int | None:
    with suppress(OSError):  # sandboxes may refuse both, which costs some speed
        return os.sched_getscheduler(0)
    return None


def _schedule(policy: int) -> None:
    with suppress(OSError):
        os.sched_setscheduler(0, policy, os.sched_param(0))
