"""Recorder of request and step measurements around one engine.

`Metrics.counts` adds to the engine's own counters; `metric_definitions` defines the metrics.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from enum import Enum
from threading import Lock
from typing import Protocol

from specdec.types.reports.stats import FAILED, Counts, HistogramCounts
from specdec.types.responses import FinishReason

ABORTED = "abort"
"""The finish reason of a request whose client left."""

AUDIT_OUTCOMES = ("equal", "tie", "impossible", "failed", "dropped")
"""Results of audits: those of a comparison, an error, and an engine that was never idle."""

FAILURE_CODES = (
    *("ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "FAILED_PRECONDITION", "INTERNAL"),
    *("INVALID_ARGUMENT", "NOT_FOUND", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED"),
    *("UNAUTHENTICATED", "UNAVAILABLE"),
)
"""The gRPC status codes of calls that end in an error."""

FIRST_TOKEN = "time_to_first_token_seconds"
INTER_TOKEN = "inter_token_latency_seconds"
END_TO_END = "e2e_request_latency_seconds"
QUEUE_TIME = "request_queue_time_seconds"
PREFILL_TIME = "request_prefill_time_seconds"
DECODE_TIME = "request_decode_time_seconds"
PROMPT_TOKENS = "request_prompt_tokens"
GENERATION_TOKENS = "request_generation_tokens"
INFERENCE_TIME = "request_inference_time_seconds"
TIME_PER_OUTPUT_TOKEN = "request_time_per_output_token_seconds"
MAX_GENERATION_TOKENS = "request_max_num_generation_tokens"
PARAMS_N = "request_params_n"
PARAMS_MAX_TOKENS = "request_params_max_tokens"
ITERATION_TOKENS = "iteration_tokens_total"
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
_CHOICE_BUCKETS = (1, 2, 5, 10, 20, 50, 100)
_TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    FIRST_TOKEN: ("From a request's arrival to its first token.", _FIRST_TOKEN_BUCKETS_S),
    INTER_TOKEN: ("Between two steps that yielded tokens of a choice.", _STEP_BUCKETS_S),
    END_TO_END: ("From a request's arrival to its last token.", _REQUEST_BUCKETS_S),
    QUEUE_TIME: ("From a request's arrival to its first step.", _FIRST_TOKEN_BUCKETS_S),
    PREFILL_TIME: ("From a request's first step to its first token.", _FIRST_TOKEN_BUCKETS_S),
    DECODE_TIME: ("From a request's first token to its last.", _REQUEST_BUCKETS_S),
    PROMPT_TOKENS: ("Prompt tokens of a request.", _TOKEN_BUCKETS),
    GENERATION_TOKENS: ("Generated tokens of a request, all choices together.", _TOKEN_BUCKETS),
    INFERENCE_TIME: ("From a request's first step to its last token.", _REQUEST_BUCKETS_S),
    TIME_PER_OUTPUT_TOKEN: (
        "Decode time of a request for each token of its longest choice after the first.",
        _STEP_BUCKETS_S,
    ),
    MAX_GENERATION_TOKENS: ("Generated tokens of a request's longest choice.", _TOKEN_BUCKETS),
    PARAMS_N: ("Requested number of choices.", _CHOICE_BUCKETS),
    PARAMS_MAX_TOKENS: ("Requested maximum of tokens, of requests that have one.", _TOKEN_BUCKETS),
    ITERATION_TOKENS: (
        "Generated tokens of a step, and prompt tokens of the requests that began since the last.",
        _TOKEN_BUCKETS,
    ),
    BATCH_SIZE: ("Choices for which a step yielded tokens.", _BATCH_BUCKETS),
    DRAFT_TIME: ("Time that a step waits for its drafts.", _DRAFT_BUCKETS_S),
    VERIFY_TIME: ("From sending the target a step to receiving its output.", _STEP_BUCKETS_S),
}
"""Meaning and buckets by name without the prefix."""

_OF_STEPS = frozenset({ITERATION_TOKENS, BATCH_SIZE, DRAFT_TIME, VERIFY_TIME})

CHAT = "chat"
TEXT_COMPLETION = "text_completion"
"""Operations by OpenTelemetry's semantic conventions for generative AI."""

REQUEST_DURATION = "request_duration_seconds"
TO_FIRST_TOKEN = "time_to_first_token_seconds"
PER_OUTPUT_TOKEN = "time_per_output_token_seconds"

_OTEL_FIRST_TOKEN_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
SERVER_LATENCIES: Mapping[str, tuple[str, tuple[float, ...]]] = {
    REQUEST_DURATION: (
        "From a request's arrival to its end, errors included.",
        (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    ),
    TO_FIRST_TOKEN: (
        "From a request's arrival to its first token, of completed requests.",
        _OTEL_FIRST_TOKEN_BUCKETS_S,
    ),
    PER_OUTPUT_TOKEN: (
        "Decode time of a completed request for each token after the first.",
        (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    ),
}
"""Meaning and buckets of the same conventions' metrics of servers, without the prefix."""


class StepRecorder(Protocol):
    """Receiver of the measurements of each engine step, on the engine's thread."""

    def record_draft(self, seconds: float) -> None:
        """Record how long a step waited for its drafts."""

    def record_verify(self, seconds: float) -> None:
        """Record how long the target took for a step."""

    def record_ahead(self, began_at_s: float, seconds: float) -> None:
        """Record when a draft model has made drafts of the next step, after the last one.

        The last step is that of the latest `record_verify`. began_at_s: by the engine's clock.
        """

    def record_batch(self, num_sequences: int, num_tokens: int) -> None:
        """Record for how many sequences a step produced tokens.

        num_tokens: since the engine's start: generated ones, and those of prompts that were
            admitted to be computed.
        """


class Histogram:
    """Thread-safe histogram."""

    def __init__(self, bounds: tuple[float, ...], lock: Lock | None = None) -> None:
        """bounds: inclusive upper bounds of the buckets, ascending. lock: shared with others."""
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._lock = lock or Lock()

    def observe(self, value: float, count: int = 1) -> None:
        """Count observations of the same value."""
        with self._lock:
            self.add(value, count)

    def add(self, value: float, count: int = 1) -> None:
        """Count observations for a caller that holds the lock."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._total += value * count

    def read(self) -> HistogramCounts:
        """Return a snapshot."""
        with self._lock:
            return HistogramCounts(self._bounds, tuple(self._counts), self._total)


class Metrics:
    """Measurements around one engine.

    Histograms are thread-safe; requests, ends and failures are counted on the event loop's thread.
    """

    def __init__(self) -> None:
        self.num_refused = 0  # requests that are demand, each choice counted as one
        self._lock = Lock()  # of requests, which end with an observation in each histogram
        self._step_lock = Lock()  # another one: the engine's thread waits for no request
        self._histograms = {
            name: Histogram(bounds, self._step_lock if name in _OF_STEPS else self._lock)
            for name, (_, bounds) in HISTOGRAMS.items()
        }
        self._server_latencies: dict[tuple[str, str, str], Histogram] = {}
        self.ended = Counter(
            dict.fromkeys([*(each.value for each in FinishReason), ABORTED, FAILED], 0)
        )
        self._num_tokens = 0  # up to the last step
        self.failed = Counter(dict.fromkeys(FAILURE_CODES, 0))  # calls by status code
        self.num_receipts = 0
        self.audits = Counter(dict.fromkeys(AUDIT_OUTCOMES, 0))  # audited answers
        self.num_audited_tokens = 0
        self._parts: dict[str, Counts] = {}  # the last ones of other processes
        self._others = Counts()  # of all of them, those that have ended too

    def __getitem__(self, name: str) -> Histogram:
        """Return a histogram by its name without the prefix."""
        return self._histograms[name]

    def observe(self, values: Mapping[str, float]) -> None:
        """Count one observation in each histogram that is named, none of them of steps."""
        assert _OF_STEPS.isdisjoint(values), "histograms of steps have another lock"
        with self._lock:
            for name, value in values.items():
                self._histograms[name].add(value)

    def observe_operation(
        self, operation: str, values: Mapping[str, float], error_type: str = ""
    ) -> None:
        """Count one observation of an ended request in each of the SERVER_LATENCIES named."""
        with self._lock:
            for name, value in values.items():
                key = name, operation, error_type
                if key not in self._server_latencies:
                    bounds = SERVER_LATENCIES[name][1]
                    self._server_latencies[key] = Histogram(bounds, self._lock)
                self._server_latencies[key].add(value)

    def count_end(self, finish_reason: str, num_choices: int = 1) -> None:
        """Count choices that ended; the reason is a FinishReason's value, ABORTED or FAILED."""
        assert finish_reason in self.ended, "unknown finish reason"
        self.ended[finish_reason] += num_choices

    def count_failure(self, code: Enum) -> None:
        """Count a call that ended in an error, by its gRPC status code."""
        self.failed[code.name] += 1

    def count_audit(self, outcome: str, num_tokens: int = 0) -> None:
        """Count an audited answer by one of AUDIT_OUTCOMES, with its tokens if compared."""
        assert outcome in self.audits, "unknown outcome"
        self.audits[outcome] += 1
        self.num_audited_tokens += num_tokens

    @property
    def histograms(self) -> Mapping[str, HistogramCounts]:
        """Snapshots of all histograms by name without the prefix."""
        return {name: each.read() for name, each in self._histograms.items()}

    @property
    def server_latencies(self) -> Mapping[str, Mapping[str, Mapping[str, HistogramCounts]]]:
        """Snapshots by metric, operation and error type."""
        found: dict[str, dict[str, dict[str, HistogramCounts]]] = {}
        for (name, operation, error_type), each in list(self._server_latencies.items()):
            found.setdefault(name, {}).setdefault(operation, {})[error_type] = each.read()
        return found

    @property
    def counts(self) -> Counts:
        """Return what was recorded, to be added to the engine's counters."""
        own = Counts(
            num_requests=self.num_refused,
            histograms=self.histograms,
            ended=dict(self.ended),
            failed=dict(self.failed),
            num_receipts=self.num_receipts,
            audits=dict(self.audits),
            num_audited_tokens=self.num_audited_tokens,
            server_latencies=self.server_latencies,
        )
        return own.plus(self._others)

    def set_part(self, name: str, counts: Counts) -> None:
        """Add what another process has recorded since its start, in place of its last counts.

        Only what is new is added to the sum: in another order of addition, rounding could lower it.
        """
        new = counts.minus(self._parts[name]) if name in self._parts else counts
        self._others = self._others.plus(new)
        self._parts[name] = counts

    def end_part(self, name: str) -> None:
        """Forget a process that has ended; what it has recorded remains."""
        self._parts.pop(name, None)

    def record_draft(self, seconds: float) -> None:
        """See StepRecorder."""
        self._histograms[DRAFT_TIME].observe(seconds)

    def record_verify(self, seconds: float) -> None:
        """See StepRecorder."""
        self._histograms[VERIFY_TIME].observe(seconds)

    def record_ahead(self, began_at_s: float, seconds: float) -> None:
        """See StepRecorder; the proposer counts these seconds (`AheadCounts`)."""

    def record_batch(self, num_sequences: int, num_tokens: int) -> None:
        """See StepRecorder."""
        with self._step_lock:
            self._histograms[BATCH_SIZE].add(num_sequences)
            self._histograms[ITERATION_TOKENS].add(num_tokens - self._num_tokens)
        self._num_tokens = num_tokens
