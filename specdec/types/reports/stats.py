"""Statistics of an engine: counters that can be added, and gauges at one moment."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from typing import Any

from specdec.types.drafts.draft_decision import Decision, DecisionChange
from specdec.types.reports.additive import Additive
from specdec.types.reports.service_curve import ServiceCurve

FAILED = "error"
"""The finish reason of a request that the engine had accepted, and that ended in an error."""

STRUCTURED_OUTPUT = "structured_output"
"""The drafting method that is counted where a grammar left a row only one continuation."""


@dataclass(frozen=True)
class SpeculationStats(Additive):
    """Counts of verified drafts, their tokens and the accepted ones.

    num_drafts: verified drafts, one per step and sequence. num_draft_tokens: tokens in them, the
    siblings of a tree counted as one.
    num_accepted_tokens: those that became output, without the last token of an output that a stop
    within a draft ended: it takes the place of the target's own.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def after_draft(self, num_draft_tokens: int, num_accepted_tokens: int) -> SpeculationStats:
        """Return the counts with one more verified draft; an empty draft is not counted."""
        if not num_draft_tokens:
            return self
        return SpeculationStats(
            self.num_drafts + 1,
            self.num_draft_tokens + num_draft_tokens,
            self.num_accepted_tokens + num_accepted_tokens,
        )

    @property
    def num_rejected_tokens(self) -> int:
        """Draft tokens that did not become output."""
        return self.num_draft_tokens - self.num_accepted_tokens

    @property
    def acceptance_rate(self) -> float:
        """Accepted per drafted token; 0 when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a draft yields, the target's own included; 1 when nothing was drafted."""
        return 1 + (self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0)


@dataclass(frozen=True)
class HistogramCounts(Additive):
    """Snapshot of a histogram that can be added to others with the same buckets.

    bounds: upper bounds of the buckets, ascending, without infinity. counts: observations in each
    bucket (not cumulative), then those above the last bound. total: sum of the observations.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    def _combined(
        self, other: HistogramCounts, combine: Callable[[Any, Any], Any]
    ) -> HistogramCounts:
        assert self.bounds == other.bounds, "histograms with different buckets"
        counts = tuple(map(combine, self.counts, other.counts))
        return HistogramCounts(self.bounds, counts, combine(self.total, other.total))

    def quantile(self, share: float) -> float | None:
        """Return the quantile `share`, from 0 to 1; None without observations.

        Interpolates linearly within a bucket and returns the last bound for observations above it,
        like Prometheus' histogram_quantile.
        """
        ends = list(accumulate(self.counts))
        if ends[-1] == 0:
            return None
        rank = share * ends[-1]
        index = bisect_left(ends, rank)
        if index >= len(self.bounds):
            return self.bounds[-1]
        low, begin = (self.bounds[index - 1], ends[index - 1]) if index else (0.0, 0)
        if self.counts[index] == 0:  # only where the rank is 0
            return low
        return low + (self.bounds[index] - low) * (rank - begin) / self.counts[index]


@dataclass
class AheadCounts(Additive):
    """Counters of the drafts that a draft model makes ahead.

    hits, misses: rounds whose outcome had a draft in time, and the others, by the number of
        accepted drafts. num_tokens: draft tokens after all outcomes. num_used_tokens: those of
        them that were sent to the target. busy_s: seconds of the draft model's forward passes.
    """

    hits: Mapping[str, int] = field(default_factory=dict)
    misses: Mapping[str, int] = field(default_factory=dict)
    num_tokens: int = 0
    num_used_tokens: int = 0
    busy_s: float = 0.0

    def record(self, num_accepted: int, *, hit: bool) -> None:
        """Count a round of which `num_accepted` drafts were accepted."""
        label = str(num_accepted)
        counts = dict(self.hits if hit else self.misses)
        counts[label] = counts.get(label, 0) + 1
        if hit:
            self.hits = counts
        else:
            self.misses = counts

    @property
    def hit_rate(self) -> float:
        """Part of the rounds that had a draft in time; 0 without any."""
        num_hits, num_misses = sum(self.hits.values()), sum(self.misses.values())
        return num_hits / (num_hits + num_misses) if num_hits + num_misses else 0.0


@dataclass
class Counts(Additive):
    """Counters of an engine, a replica or a fleet since its start; they only grow and can be added.

    Each part fills in the fields it counts, and `plus` merges the parts: the engine and its
    scheduler (requests, tokens, steps, drafts, decisions), `Metrics` (refused requests, ends and
    histograms) and the executor (restarts). A new counter is a field here and a metric in
    `engine.metrics`.

    num_requests: received requests, each choice counted as one.
    accepted_by_position, drafted_by_position: draft tokens by position, first to last; drafted
        tokens whether accepted or not; the siblings of a tree count as one. drafted_by_method,
        accepted_by_method: the same for each drafting method, STRUCTURED_OUTPUT included.
    decisions: steps by their reason. decided_lengths: steps by draft length, 0 first.
    histograms: by metric name. ended: choices by finish reason. failed: calls by gRPC status code.
    num_cached_tokens: prompt tokens found in the prefix cache.
    num_prefill_chunks: rows that left a part of the prompt uncomputed.
    num_lookahead_tokens: guesses run after the drafts by lookahead decoding.
    num_catch_up_tokens: tokens that the draft model computed to catch up. num_late_drafts: steps
        without the drafts of a slow draft worker. num_draft_moves: to other draft workers.
    num_target_restarts, num_draft_restarts: restarts of each model's workers.
    num_steps_ahead: steps begun before the result of the previous one was collected.
    drafts_by_version: drafts of the target's head by its version, of the versions that are
        remembered. num_drafter_rollbacks: versions that were replaced for their acceptance.
    ahead: drafts that a draft model made while the target verified the ones before.
    tokens_by_adapter, drafts_by_adapter: generated tokens, and verified drafts, by the name of the
        adapter; of a limited number of names.
    measured_s, profiled_s: seconds of steps without prefill under policy `goodput`, by their number
        of draft tokens, and those that the table profiled at start-up has for them. spent_s:
        the sum of the former, with the seconds of waiting for drafts. undrafted_s: those that the
        same tokens are estimated to take without drafts.
    num_saved_states: snapshots that were taken of states of recurrent layers. num_resumed_tokens:
        tokens before those from which sequences began. num_stateless_tokens: tokens with cached KV
        that were computed again, since the last snapshot was before them.
    num_drafted_steps: steps that verified a draft. reached_by_position: draft tokens by position of
        which all earlier ones of their draft were accepted.
    num_receipts: issued ones. audits: audited answers by outcome. num_audited_tokens: in them.
    server_latencies: by metric of OpenTelemetry, operation and error type, empty without an error.

    Fields from decided_lengths on are exported over HTTP only.
    """

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_steps: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    accepted_by_position: tuple[int, ...] = ()
    decisions: Mapping[str, int] = field(default_factory=dict)
    histograms: Mapping[str, HistogramCounts] = field(default_factory=dict)
    drafted_by_position: tuple[int, ...] = ()
    decided_lengths: tuple[int, ...] = ()
    drafted_by_method: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    accepted_by_method: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    ended: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, int] = field(default_factory=dict)
    num_cached_tokens: int = 0
    num_prefill_chunks: int = 0
    num_preemptions: int = 0
    num_lookahead_tokens: int = 0
    num_catch_up_tokens: int = 0
    num_late_drafts: int = 0
    num_target_restarts: int = 0
    num_draft_restarts: int = 0
    num_steps_ahead: int = 0
    drafts_by_version: Mapping[str, SpeculationStats] = field(default_factory=dict)
    num_drafter_rollbacks: int = 0
    tokens_by_adapter: Mapping[str, int] = field(default_factory=dict)
    drafts_by_adapter: Mapping[str, SpeculationStats] = field(default_factory=dict)
    measured_s: Mapping[str, float] = field(default_factory=dict)
    profiled_s: Mapping[str, float] = field(default_factory=dict)
    spent_s: float = 0.0
    undrafted_s: float = 0.0
    num_drafted_steps: int = 0
    reached_by_position: tuple[int, ...] = ()
    ahead: AheadCounts = field(default_factory=AheadCounts)
    num_saved_states: int = 0
    num_resumed_tokens: int = 0
    num_stateless_tokens: int = 0
    num_receipts: int = 0
    audits: Mapping[str, int] = field(default_factory=dict)
    num_audited_tokens: int = 0
    server_latencies: Mapping[str, Mapping[str, Mapping[str, HistogramCounts]]] = field(
        default_factory=dict
    )
    num_draft_moves: int = 0


class DraftCounter:
    """Counter of verified drafts by drafting method and position.

    Nothing else is counted per row: positions and totals are summed up when read.
    """

    def __init__(self) -> None:
        self._drafts: Counter[tuple[str, int, int]] = Counter()  # by method, drafted and accepted
        self._num_steps = 0
        self._has_drafts = False  # in the present step

    def record(self, method: str, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Count one verified draft, of which a prefix was accepted; an empty one is not counted."""
        if num_draft_tokens:
            self._drafts[method, num_draft_tokens, num_accepted_tokens] += 1
            self._has_drafts = True

    def end_step(self) -> None:
        """Count the step if it had a draft."""
        self._num_steps += self._has_drafts
        self._has_drafts = False

    def added_to(self, counts: Counts) -> Counts:
        """Return a copy of `counts` with the fields about drafts filled in."""
        total = object.__new__(Counts)
        vars(total).update(vars(counts))
        if not self._drafts:
            return total
        total.drafted_by_method, total.accepted_by_method = self._by_method()
        drafted = total.drafted_by_position = _totals(total.drafted_by_method)
        accepted = total.accepted_by_position = _totals(total.accepted_by_method)
        total.speculation = SpeculationStats(self._drafts.total(), sum(drafted), sum(accepted))
        total.num_drafted_steps, total.reached_by_position = self._num_steps, self._reached()
        return total

    def _reached(self) -> tuple[int, ...]:
        """Return the drafted tokens by position whose predecessors were all accepted."""
        ends = Counter({0: 0})  # of the reached positions
        for (_, num_drafted, num_accepted), count in self._drafts.items():
            ends[min(num_drafted, num_accepted + 1)] += count
        most = max(ends)
        return tuple(
            sum(ends[end] for end in range(place, most + 1)) for place in range(1, most + 1)
        )

    def _by_method(self) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
        """Return the drafted and the accepted tokens by method and position."""
        longest: dict[str, int] = {}
        for method, num_drafted, _ in self._drafts:
            longest[method] = max(num_drafted, longest.get(method, 0))
        drafted = {method: [0] * length for method, length in longest.items()}
        accepted = {method: [0] * length for method, length in longest.items()}
        for (method, num_drafted, num_accepted), count in self._drafts.items():
            for own, length in ((drafted, num_drafted), (accepted, num_accepted)):
                for position in range(length):
                    own[method][position] += count
        return (
            {method: tuple(counts) for method, counts in drafted.items()},
            {method: tuple(counts) for method, counts in accepted.items()},
        )


def _totals(by_method: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """Return the sums by position."""
    return tuple(map(sum, zip_longest(*by_method.values(), fillvalue=0)))


@dataclass(frozen=True)
class AdaptersInUse:
    """Names of the adapters of running and of queued requests, in alphabetical order.

    loaded: those that requests may name.
    """

    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    loaded: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EngineReport:
    """Report of an engine, and of its replica: the source of an engine's metrics.

    is_speculation_on: whether a request without speculation options gets drafts.
    mode: of speculation, with the active rule; empty where nothing can draft.
    estimated_speedup: over no speculation, for the decision and batch of the last step; None where
        no costs are known. estimated_tokens_per_s: of that batch; None likewise.
    profile_error: seconds of steps of that kind over those that the table of the start has for
        them; None likewise, and before any such step.
    num_snapshots: of states of recurrent layers; None where none are taken. state_bytes: of these
        and of the states of running sequences; None without such layers.
    head_probe_acceptance: share of the first draft tokens of a head that were the target's in the
        probe at start-up; None without a head.
    drafter_version: of the head that drafts; None without a head.
    service_curve: expected rates by load; None where no costs are known. It is no news.
    block_size: tokens of a KV block. num_kv_blocks: of the cache.
    max_loras: different adapters in a step; 0 without adapters.
    at_s: when it was read, in seconds since 1970; a report that differs in nothing else is no news.
    counts: since the start.
    """

    num_running: int = 0
    num_decoding: int = 0
    num_waiting: int = 0
    is_speculation_on: bool = False
    mode: str = ""
    estimated_speedup: float | None = None
    estimated_tokens_per_s: float | None = None
    profile_error: float | None = None
    head_probe_acceptance: float | None = None
    drafter_version: int | None = None
    service_curve: ServiceCurve | None = field(default=None, compare=False)
    block_size: int = 0
    num_kv_blocks: int = 0
    num_snapshots: int | None = None
    state_bytes: int | None = None
    max_loras: int = 0
    adapters_in_use: AdaptersInUse = AdaptersInUse()
    at_s: float = field(default=0.0, compare=False)
    counts: Counts = field(default_factory=Counts)


@dataclass(frozen=True)
class EngineStats(EngineReport):
    """Gauges of an engine at one moment, and its counters since the start.

    last_batch_size: sequences for which the last step produced tokens.
    num_speculation_flips: how often `is_speculation_on` has changed.
    decision: of the last step that decoded something; None without a policy.
    decision_changes: the latest changes of the decision, oldest first.
    """

    num_blocks: int
    num_free_blocks: int
    last_batch_size: int = 0
    num_speculation_flips: int = 0
    decision: Decision | None = None
    decision_changes: tuple[DecisionChange, ...] = ()

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV blocks in use, from 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks

    @property
    def chosen(self) -> Decision | None:
        """The decision in force; None before the first step that it applied to."""
        return self.decision if self.counts.decisions else None

    @property
    def num_chosen_tokens(self) -> int:
        """Draft tokens of a sequence in the last step."""
        return self.chosen.num_draft_tokens if self.chosen else 0
