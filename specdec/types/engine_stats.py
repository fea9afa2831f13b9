"""The load of an engine at one moment, with its counters."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.types.counters import Counts
from specdec.types.draft_decision import Decision, DecisionChange


@dataclass(frozen=True)
class EngineStats:
    """Gauges of an engine at one moment, and its counters since the start.

    last_batch_size: sequences for which the last step produced tokens.
    is_speculation_on: whether a request without speculation options gets drafts.
    num_speculation_flips: how often that has changed.
    mode: of speculation, filled in by EngineCore; empty where nothing can draft.
    decision: of the last step that decoded something; None without a policy.
    decision_changes: the latest changes of the decision, oldest first.
    estimated_speedup: over no speculation, for the decision and batch of the last step; None where
        no costs are known. estimated_tokens_per_s: of that batch; None likewise.
    capacity_tokens_per_s: expected throughput of a full batch; None if not measured.
    """

    num_running: int
    num_decoding: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    last_batch_size: int = 0
    is_speculation_on: bool = False
    num_speculation_flips: int = 0
    mode: str = ""
    decision: Decision | None = None
    decision_changes: tuple[DecisionChange, ...] = ()
    estimated_speedup: float | None = None
    estimated_tokens_per_s: float | None = None
    capacity_tokens_per_s: float | None = None
    counts: Counts = field(default_factory=Counts)

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
