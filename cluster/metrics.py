"""What Prometheus is told of one replica; docs/metrics.md lists it all.

Names follow vLLM's behind a prefix of our own, so that its dashboards work once the prefix is
replaced. Counts of the engine are read from its last snapshot when a scrape comes; only what
happens to single requests is recorded as it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from grpc import StatusCode
from prometheus_client import CollectorRegistry, Counter, Histogram, exposition
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from specdec.client import HistogramCounts
from specdec.finish_reason import FinishReason
from specdec.stats import EngineStats

PREFIX = "specdec:"
ABORTED = "abort"
"""The finish reason of a request whose client left."""

FIRST_TOKEN = "time_to_first_token_seconds"
INTER_TOKEN = "inter_token_latency_seconds"

_OPEN_METRICS = "application/openmetrics-text"
_LABELS = ("model_name", "replica")

_FIRST_TOKEN_BUCKETS_S = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_INTER_TOKEN_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip
_REQUEST_BUCKETS_S = (
    0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0,
)  # fmt: skip
_BATCH_BUCKETS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)


@dataclass(frozen=True)
class Exposition:
    """Everything as text, in the format that the scraper asked for."""

    body: bytes
    content_type: str


class Metrics:
    """The metrics of one replica, in a registry of their own.

    Recording is for the event loop's thread; reading may happen on any.
    """

    def __init__(
        self, model_name: str, replica: str, snapshot: Callable[[], EngineStats | None]
    ) -> None:
        """`snapshot` returns the engine's counts at once; None while there is no engine."""
        self._label_values = (model_name, replica)
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(self._label_values, snapshot))
        self.time_to_first_token = self._histogram(
            FIRST_TOKEN,
            "From a request's arrival to its first token.",
            _FIRST_TOKEN_BUCKETS_S,
        )
        self.inter_token_latency = self._histogram(
            INTER_TOKEN,
            "Between two outputs of a choice, each of one token or more.",
            _INTER_TOKEN_BUCKETS_S,
        )
        self.request_latency = self._histogram(
            "e2e_request_latency_seconds",
            "From a request's arrival to its last token, of whichever choice.",
            _REQUEST_BUCKETS_S,
        )
        self.batch_size = self._histogram(
            "batch_size", "Choices of requests that a step brought tokens to.", _BATCH_BUCKETS
        )
        success = self._counter(
            "request_success",
            "Requests that ended, by why the last choice did.",
            "finished_reason",
        )
        reasons = [*(reason.value for reason in FinishReason), ABORTED]
        self._ended = {reason: success.labels(*self._label_values, reason) for reason in reasons}
        self._failed = self._counter(
            "request_failure", "Calls that ended in an error, by gRPC status code.", "code"
        )

    def count_end(self, finish_reason: str) -> None:
        """Counts a request that ended; the reason is a FinishReason's value or ABORTED."""
        self._ended[finish_reason].inc()

    def count_failure(self, code: StatusCode) -> None:
        """Counts a call that ended in an error, whatever interface it came by."""
        self._failed.labels(*self._label_values, code.name).inc()

    def expose(self, accept: str) -> Exposition:
        """Prometheus' text format, or OpenMetrics where the Accept header asks for it."""
        if _OPEN_METRICS in accept:
            # Under its other rules of escaping the encoder replaces our colon, in some lines only.
            body: bytes = openmetrics.generate_latest(
                self._registry, escaping=openmetrics.ALLOWUTF8
            )
            return Exposition(body, openmetrics.CONTENT_TYPE_LATEST)
        body = exposition.generate_latest(self._registry)
        return Exposition(body, exposition.CONTENT_TYPE_PLAIN_0_0_4)

    def histogram_counts(self) -> dict[str, HistogramCounts]:
        """The histograms as plain numbers, by name without the prefix, to be added up."""
        histograms = {
            FIRST_TOKEN: self.time_to_first_token,
            INTER_TOKEN: self.inter_token_latency,
            "e2e_request_latency_seconds": self.request_latency,
            "batch_size": self.batch_size,
        }
        return {name: _plain(histogram) for name, histogram in histograms.items()}

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            PREFIX + name, meaning, _LABELS, buckets=buckets, registry=self._registry
        )
        return histogram.labels(*self._label_values)

    def _counter(self, name: str, meaning: str, label: str) -> Counter:
        return Counter(PREFIX + name, meaning, (*_LABELS, label), registry=self._registry)


def _plain(histogram: Histogram) -> HistogramCounts:
    """Of one without labels left to give. A sample of Prometheus counts those below it too."""
    bounds, cumulative, total = [], [], 0.0
    [metric] = histogram.collect()
    for sample in metric.samples:
        if sample.name.endswith("_bucket"):
            bounds.append(float(sample.labels["le"]))
            cumulative.append(int(sample.value))
        elif sample.name.endswith("_sum"):
            total = float(sample.value)
    counts = [after - before for before, after in pairwise([0, *cumulative])]
    return HistogramCounts(tuple(bounds[:-1]), tuple(counts), total)


_Reading = tuple[str, str, Callable[[EngineStats], float]]

_GAUGES: tuple[_Reading, ...] = (
    (
        "num_requests_running",
        "Requests in the batch; each choice is one.",
        lambda stats: stats.num_running,
    ),
    (
        "num_requests_decoding",
        "Running requests past their prompt; speculation is decided by them.",
        lambda stats: stats.num_decoding,
    ),
    (
        "num_requests_waiting",
        "Requests in the queue; each choice is one.",
        lambda stats: stats.num_waiting,
    ),
    (
        "kv_cache_usage_perc",
        "Part of the KV blocks in use, from 0 to 1.",
        lambda stats: 1 - stats.num_free_blocks / stats.num_blocks,
    ),
)
_COUNTERS: tuple[_Reading, ...] = (
    ("engine_steps", "Forward passes of the target.", lambda stats: stats.num_steps),
    (
        "prompt_tokens",
        "Tokens of prompts, by choice.",
        lambda stats: stats.num_prompt_tokens,
    ),
    (
        "prompt_tokens_cached",
        "Tokens of prompts whose KV the prefix cache had.",
        lambda stats: stats.num_cached_tokens,
    ),
    ("generation_tokens", "Tokens generated.", lambda stats: stats.num_generated_tokens),
    (
        "prefill_chunks",
        "Parts of prompts that left more of the prompt to do.",
        lambda stats: stats.num_prefill_chunks,
    ),
    (
        "num_preemptions",
        "Requests that gave up their KV blocks and were computed again.",
        lambda stats: stats.num_preemptions,
    ),
    (
        "spec_decode_num_drafts",
        "Drafts verified, one a step and request.",
        lambda stats: stats.speculation.num_drafts,
    ),
    (
        "spec_decode_num_draft_tokens",
        "Draft tokens verified.",
        lambda stats: stats.speculation.num_draft_tokens,
    ),
    (
        "spec_decode_num_accepted_tokens",
        "Draft tokens that became output.",
        lambda stats: stats.speculation.num_accepted_tokens,
    ),
    (
        "spec_decode_num_lookahead_tokens",
        "Guesses of lookahead decoding that were run to see what follows them.",
        lambda stats: stats.num_lookahead_tokens,
    ),
)


class _EngineCollector(Collector):
    """Turns the engine's last snapshot into metrics, without a word to the engine's thread."""

    def __init__(
        self, label_values: tuple[str, str], snapshot: Callable[[], EngineStats | None]
    ) -> None:
        self._label_values = label_values
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """One family each; without samples until there is an engine."""
        stats = self._snapshot()
        for readings, family_type in (
            (_GAUGES, GaugeMetricFamily),
            (_COUNTERS, CounterMetricFamily),
        ):
            for name, meaning, read in readings:
                family = family_type(PREFIX + name, meaning, labels=_LABELS)
                if stats is not None:
                    family.add_metric(self._label_values, read(stats))
                yield family
        yield self._accepted_by_position(stats)

    def _accepted_by_position(self, stats: EngineStats | None) -> Metric:
        family = CounterMetricFamily(
            PREFIX + "spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by their position in the draft, from 0.",
            labels=(*_LABELS, "position"),
        )
        for position, count in enumerate(stats.accepted_by_position if stats else ()):
            family.add_metric((*self._label_values, str(position)), count)
        return family
