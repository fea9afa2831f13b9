"""Sends requests at their arrival times and records the time of every event."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from cluster.cli.bench.backend import Backend, RequestFailedError, TokenUsage
from cluster.cli.bench.dataset import SampleRequest

MAX_THREADS = 1024
"""Each open request uses a thread; requests beyond this limit are sent late, which is reported."""


@dataclass(frozen=True)
class RequestRecord:
    """Times of a request, in seconds since the start of the run.

    due_s: its arrival time; None in a closed loop. sent_s: when it was sent. token_times_s: the
    time of each message with tokens. done_s: the end. usage: None if it failed. error: the kind of
    failure, or None.
    """

    due_s: float | None
    sent_s: float
    token_times_s: tuple[float, ...]
    done_s: float
    usage: TokenUsage | None
    error: str | None = None


def send_requests(
    backend: Backend,
    requests: Sequence[SampleRequest],
    due_s: Sequence[float | None],
    max_concurrency: int | None,
    progress: Callable[[], None],
) -> list[RequestRecord]:
    """Send each request when it is due, and wait for all streams to end.

    due_s: ascending arrival times; None makes a closed loop, which sends a request as soon as
    another one ends. max_concurrency: maximum number of open requests; None for no limit.
    progress: called after each request, from any thread.
    """
    num_threads = min(max_concurrency or MAX_THREADS, MAX_THREADS, max(len(requests), 1))
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="bench")
    start_s = time.perf_counter()

    def now() -> float:
        return time.perf_counter() - start_s

    def run(request: SampleRequest, due: float | None) -> RequestRecord:
        record = _send(backend, request, due, now)
        progress()
        return record

    futures: list[Future[RequestRecord]] = []
    try:
        for request, due in zip(requests, due_s, strict=True):
            time.sleep(max(0.0, (due or 0.0) - now()))
            futures.append(pool.submit(run, request, due))
        return [future.result() for future in futures]
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        backend.close()  # ends the open streams, and so the threads
        raise
    finally:
        pool.shutdown()


def _send(
    backend: Backend, request: SampleRequest, due_s: float | None, now: Callable[[], float]
) -> RequestRecord:
    sent_s, token_times_s, usage, error = now(), [], None, None
    try:
        for event in backend.stream(request):
            if event.has_tokens:
                token_times_s.append(now())
            usage = event.usage or usage
    except RequestFailedError as failure:
        usage, error = None, failure.kind
    else:  # without usage, count one token per event
        usage = usage or TokenUsage(0, len(token_times_s))
    return RequestRecord(due_s, sent_s, tuple(token_times_s), now(), usage, error)
