"""Sends requests at their arrival times, records the time of every event, and computes statistics.

The latencies are those of `vllm bench serve`, in milliseconds:

* ttft: time to first token, from sending the request to the first message with tokens.
* tpot: time per output token after that message, (end - first) / (tokens - 1).
* itl: inter-token latency, between two messages with tokens; a message may have several tokens.
* e2el: end-to-end latency.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from cluster.cli.bench.backend import Backend, RequestFailedError, TokenUsage
from cluster.cli.bench.dataset import SampleRequest
from specdec.types.reports.stats import SpeculationStats

LatencyName = Literal["ttft", "tpot", "itl", "e2el"]
LATENCIES: tuple[LatencyName, ...] = get_args(LatencyName)
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


@dataclass(frozen=True)
class Distribution:
    """Statistics of a sample. percentiles: by percent, linearly interpolated."""

    mean: float
    median: float
    std: float
    percentiles: Mapping[float, float]

    @property
    def statistics(self) -> dict[str, float]:
        """Mean, median and percentiles by name, such as p99."""
        percentiles = {f"p{percent:g}": value for percent, value in self.percentiles.items()}
        return {"mean": self.mean, "median": self.median, **percentiles}


@dataclass(frozen=True)
class LoadSummary:
    """Statistics of one run. latencies_ms has no entry for a latency that no request has.

    duration_s: from the first request sent to the end of the last one. request_goodput: requests
    per second that met every objective; None without objectives. max_lateness_s: the maximum delay
    from the arrival time to sending; 0 in a closed loop. peak_concurrency: the maximum number of
    open requests. speculation: None if the service does not report it.
    """

    completed: int
    failed: int
    errors: Mapping[str, int]
    duration_s: float
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    request_goodput: float | None
    peak_concurrency: int
    max_lateness_s: float
    latencies_ms: Mapping[LatencyName, Distribution]
    speculation: SpeculationStats | None


def summarize(
    records: Sequence[RequestRecord],
    percentiles: Sequence[float],
    objectives_ms: Mapping[LatencyName, float],
) -> LoadSummary:
    """Compute the statistics of a run.

    objectives_ms: limits that a request must meet to count for goodput.
    """
    done = [record for record in records if record.usage is not None]
    duration_s = max(each.done_s for each in records) - min(each.sent_s for each in records)
    per_second = 1 / duration_s if duration_s > 0 else 0.0
    input_tokens = sum(each.usage.prompt_tokens for each in done if each.usage)
    output_tokens = sum(each.usage.completion_tokens for each in done if each.usage)
    values = {name: [ms for each in done for ms in latency_ms(each, name)] for name in LATENCIES}
    good = sum(_is_good(each, objectives_ms) for each in done)
    return LoadSummary(
        completed=len(done),
        failed=len(records) - len(done),
        errors=Counter(each.error for each in records if each.error is not None),
        duration_s=duration_s,
        total_input_tokens=input_tokens,
        total_output_tokens=output_tokens,
        request_throughput=len(done) * per_second,
        output_throughput=output_tokens * per_second,
        total_token_throughput=(input_tokens + output_tokens) * per_second,
        request_goodput=good * per_second if objectives_ms else None,
        peak_concurrency=peak_concurrency(records),
        max_lateness_s=max(map(_lateness_s, records)),
        latencies_ms={
            name: distribution(found, percentiles) for name, found in values.items() if found
        },
        speculation=_speculation(done),
    )


def latency_ms(record: RequestRecord, name: LatencyName) -> list[float]:
    """Return the values of one request: one, none if it has too few tokens, or one per itl gap."""
    if name == "e2el":
        return [1000 * (record.done_s - record.sent_s)]
    if not record.token_times_s:
        return []
    if name == "ttft":
        return [1000 * (record.token_times_s[0] - record.sent_s)]
    if name == "itl":
        return [1000 * (after - before) for before, after in pairwise(record.token_times_s)]
    num_tokens = 0 if record.usage is None else record.usage.completion_tokens
    decoding_s = record.done_s - record.token_times_s[0]
    return [1000 * decoding_s / (num_tokens - 1)] if num_tokens > 1 else []


def distribution(values: Sequence[float], percentiles: Sequence[float]) -> Distribution:
    """Compute the statistics of at least one value; std is the population standard deviation."""
    ordered = sorted(values)
    return Distribution(
        mean=statistics.fmean(ordered),
        median=percentile(ordered, 50),
        std=statistics.pstdev(ordered),
        percentiles={percent: percentile(ordered, percent) for percent in percentiles},
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of ascending values, interpolated linearly between the nearest ranks."""
    rank = (len(ordered) - 1) * percent / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """Return the maximum number of requests that were open at once."""
    changes = [(each.sent_s, 1) for each in records] + [(each.done_s, -1) for each in records]
    number = peak = 0
    for _, change in sorted(changes):  # at equal times, ends come first
        number += change
        peak = max(peak, number)
    return peak


def _lateness_s(record: RequestRecord) -> float:
    return 0.0 if record.due_s is None else max(0.0, record.sent_s - record.due_s)


def _is_good(record: RequestRecord, objectives_ms: Mapping[LatencyName, float]) -> bool:
    return all(
        statistics.fmean(values) <= limit
        for name, limit in objectives_ms.items()
        if (values := latency_ms(record, name))
    )


def _speculation(done: Sequence[RequestRecord]) -> SpeculationStats | None:
    stats = [each.usage.speculation for each in done if each.usage and each.usage.speculation]
    return SpeculationStats.sum(stats) if stats else None
