"""What is recorded of requests and steps, as it happens.

What the engine counts itself is in its statistics; `counts_of` puts both together, and
`specdec.engine.metric_definitions` says what the metrics are that are made of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from enum import Enum
from threading import Lock

from specdec.types.counters import Counts, HistogramCounts, ModelCounts
from specdec.types.responses import FinishReason
from specdec.types.stats import EngineStats

ABORTED = "abort"
"""The finish reason of a request whose client left."""

FIRST_TOKEN = "time_to_first_token_seconds"
INTER_TOKEN = "inter_token_latency_seconds"
END_TO_END = "e2e_request_latency_seconds"
QUEUE_TIME = "request_queue_time_seconds"
PREFILL_TIME = "request_prefill_time_seconds"
DECODE_TIME = "request_decode_time_seconds"
PROMPT_TOKENS = "request_prompt_tokens"
GENERATION_TOKENS = "request_generation_tokens"
BATCH_SIZE = "batch_size"
DRAFT_TIME = "draft_time_seconds"
VERIFY_TIME = "verify_time_seconds"

_FIRST_TOKEN_BUCKETS_S = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_STEP_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip
_DRAFT_BUCKETS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 10.0,
)  # fmt: skip
_REQUEST_BUCKETS_S = (
    0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0,
)  # fmt: skip
_BATCH_BUCKETS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
_TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

_BUCKETS: Mapping[str, tuple[float, ...]] = {
    FIRST_TOKEN: _FIRST_TOKEN_BUCKETS_S,
    INTER_TOKEN: _STEP_BUCKETS_S,
    END_TO_END: _REQUEST_BUCKETS_S,
    QUEUE_TIME: _FIRST_TOKEN_BUCKETS_S,
    PREFILL_TIME: _FIRST_TOKEN_BUCKETS_S,
    DECODE_TIME: _REQUEST_BUCKETS_S,
    PROMPT_TOKENS: _TOKEN_BUCKETS,
    GENERATION_TOKENS: _TOKEN_BUCKETS,
    BATCH_SIZE: _BATCH_BUCKETS,
    DRAFT_TIME: _DRAFT_BUCKETS_S,
    VERIFY_TIME: _STEP_BUCKETS_S,
}


class Histogram:
    """Counts observations by buckets. Observing and reading may happen on any thread."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """bounds: upper bounds, ascending, which belong to their buckets; one more has the rest."""
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._lock = Lock()

    def observe(self, value: float) -> None:
        """Counts one observation."""
        with self._lock:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._total += value

    def read(self) -> HistogramCounts:
        """What was observed so far."""
        with self._lock:
            return HistogramCounts(self._bounds, tuple(self._counts), self._total)


class Metrics:
    """What is recorded around one engine. Ends and failures are for the event loop's thread."""

    def __init__(self) -> None:
        self._histograms = {name: Histogram(bounds) for name, bounds in _BUCKETS.items()}
        self._ended = Counter(dict.fromkeys([*(each.value for each in FinishReason), ABORTED], 0))
        self._failed: Counter[str] = Counter()

    def __getitem__(self, name: str) -> Histogram:
        """A histogram, by its name without the prefix."""
        return self._histograms[name]

    def count_end(self, finish_reason: str) -> None:
        """Counts a request that ended; the reason is a FinishReason's value or ABORTED."""
        assert finish_reason in self._ended, "a reason that no label has"
        self._ended[finish_reason] += 1

    def count_failure(self, code: Enum) -> None:
        """Counts a call that ended in an error, by the name of its gRPC status code."""
        self._failed[code.name] += 1

    @property
    def ended(self) -> Mapping[str, int]:
        """Requests that ended, by why; every reason is there."""
        return dict(self._ended)

    @property
    def failed(self) -> Mapping[str, int]:
        """Calls that ended in an error, by the name of the gRPC status code."""
        return dict(self._failed)

    @property
    def histograms(self) -> Mapping[str, HistogramCounts]:
        """All of them as plain numbers, by name without the prefix, to be added up."""
        return {name: each.read() for name, each in self._histograms.items()}


def counts_of(
    stats: EngineStats, num_requests: int, metrics: Metrics, models: ModelCounts
) -> Counts:
    """What an engine has done since it started."""
    return Counts(
        num_requests=num_requests,
        num_prompt_tokens=stats.num_prompt_tokens,
        num_generated_tokens=stats.num_generated_tokens,
        num_steps=stats.num_steps,
        speculation=stats.speculation,
        accepted_by_position=stats.accepted_by_position,
        drafted_by_position=stats.drafted_by_position,
        drafted_by_method=stats.drafted_by_method,
        accepted_by_method=stats.accepted_by_method,
        decisions={reason.value: count for reason, count in stats.decisions.items()},
        decided_lengths=stats.decided_lengths,
        histograms=metrics.histograms,
        ended=metrics.ended,
        failed=metrics.failed,
        num_cached_tokens=stats.num_cached_tokens,
        num_prefill_chunks=stats.num_prefill_chunks,
        num_preemptions=stats.num_preemptions,
        num_lookahead_tokens=stats.num_lookahead_tokens,
        num_catch_up_tokens=models.num_catch_up_tokens,
        num_target_restarts=models.num_target_restarts,
        num_draft_restarts=models.num_draft_restarts,
    )
