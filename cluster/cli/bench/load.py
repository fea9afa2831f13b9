"""Asks a service many questions, when they are due, and notes when it hears of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from cluster.cli.bench.backend import Backend, RequestFailedError, TokenUsage
from cluster.cli.bench.questions import Question

MAX_THREADS = 1024
"""Each open request has one; beyond that, requests are late, which the report tells."""


@dataclass(frozen=True)
class Record:
    """A request, in seconds since the run began.

    due_s: when it should be sent; None in a closed loop. sent_s: when it was. heard_s: each message
    that brought tokens. done_s: the end. usage: None where it failed. error: what kind of failure,
    or None.
    """

    due_s: float | None
    sent_s: float
    heard_s: tuple[float, ...]
    done_s: float
    usage: TokenUsage | None
    error: str | None = None


def ask_all(
    backend: Backend,
    questions: Sequence[Question],
    due_s: Sequence[float | None],
    max_concurrency: int | None,
    progress: Callable[[], None],
) -> list[Record]:
    """Sends each question when it is due, and waits for all answers.

    due_s: ascending; None makes a closed loop, in which a question is sent as soon as there is a
    place. max_concurrency: most open requests; None for as many as are due. progress: called for
    each that is done, by whatever thread.
    """
    num_threads = min(max_concurrency or MAX_THREADS, MAX_THREADS, max(len(questions), 1))
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="asks")
    began_s = time.perf_counter()

    def now() -> float:
        return time.perf_counter() - began_s

    def run(question: Question, due: float | None) -> Record:
        record = _ask(backend, question, due, now)
        progress()
        return record

    futures: list[Future[Record]] = []
    try:
        for question, due in zip(questions, due_s, strict=True):
            time.sleep(max(0.0, (due or 0.0) - now()))
            futures.append(pool.submit(run, question, due))
        return [future.result() for future in futures]
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        backend.close()  # ends what is being answered, and so the threads
        raise
    finally:
        pool.shutdown()


def _ask(
    backend: Backend, question: Question, due_s: float | None, now: Callable[[], float]
) -> Record:
    sent_s, heard_s, usage, error = now(), [], None, None
    try:
        for heard in backend.ask(question):
            if heard.brings_tokens:
                heard_s.append(now())
            usage = heard.usage or usage
    except RequestFailedError as failure:
        usage, error = None, failure.kind
    else:
        usage = usage or TokenUsage(0, len(heard_s))  # a service that tells none: one an event
    return Record(due_s, sent_s, tuple(heard_s), now(), usage, error)
