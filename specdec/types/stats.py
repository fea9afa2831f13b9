"""Counters that the engine keeps; metrics and usage reports are made from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce

from specdec.types.draft_decision import Decision, DecisionChange, DecisionReason

STRUCTURED_OUTPUT = "structured_output"
"""Stands for a method where a grammar alone left a row one way to go on."""


@dataclass(frozen=True)
class SpeculationStats:
    """What was drafted and what came of it, for one request or for all.

    num_drafts: drafts verified, one a step and sequence. num_draft_tokens: tokens in them.
    num_accepted_tokens: those that became output.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @classmethod
    def sum(cls, stats: Iterable[SpeculationStats]) -> SpeculationStats:
        """All together."""
        return reduce(cls.plus, stats, cls())

    def after_draft(self, num_draft_tokens: int, num_accepted_tokens: int) -> SpeculationStats:
        """With one more verified draft; an empty one is none."""
        if not num_draft_tokens:
            return self
        return SpeculationStats(
            self.num_drafts + 1,
            self.num_draft_tokens + num_draft_tokens,
            self.num_accepted_tokens + num_accepted_tokens,
        )

    def plus(self, other: SpeculationStats) -> SpeculationStats:
        """Both together."""
        return SpeculationStats(
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
        )

    def minus(self, before: SpeculationStats) -> SpeculationStats:
        """What was counted after `before`, by the same."""
        return SpeculationStats(
            self.num_drafts - before.num_drafts,
            self.num_draft_tokens - before.num_draft_tokens,
            self.num_accepted_tokens - before.num_accepted_tokens,
        )

    @property
    def acceptance_rate(self) -> float:
        """Accepted per drafted token; 0 when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a draft yields, the target's own included; 1 when nothing was drafted."""
        return 1 + (self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0)


class AcceptanceByPosition:
    """How many drafts had a token at each position, and how many had it accepted, first to last."""

    def __init__(self) -> None:
        self._drafted: list[int] = []
        self._counts: list[int] = []

    def record(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Counts one verified draft, of which a prefix was accepted."""
        num_new = num_draft_tokens - len(self._counts)
        self._drafted.extend([0] * num_new)
        self._counts.extend([0] * num_new)
        for position in range(num_draft_tokens):
            self._drafted[position] += 1
            self._counts[position] += position < num_accepted_tokens

    @property
    def drafted(self) -> tuple[int, ...]:
        """Drafts that had a token there, for each position of the longest draft so far."""
        return tuple(self._drafted)

    @property
    def counts(self) -> tuple[int, ...]:
        """One for each position of the longest draft so far."""
        return tuple(self._counts)


@dataclass
class EngineCounters:
    """What an engine counts itself; see EngineStats."""

    num_steps: int = 0
    last_batch_size: int = 0
    num_prompt_tokens: int = 0
    num_prefill_chunks: int = 0
    num_generated_tokens: int = 0
    num_lookahead_tokens: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    accepted_by_position: AcceptanceByPosition = field(default_factory=AcceptanceByPosition)
    by_method: dict[str, AcceptanceByPosition] = field(default_factory=dict)

    def record_draft(self, drafter: str, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Counts one verified draft, in all and for what made it; an empty one is none."""
        if not num_draft_tokens:
            return
        self.speculation = self.speculation.after_draft(num_draft_tokens, num_accepted_tokens)
        self.accepted_by_position.record(num_draft_tokens, num_accepted_tokens)
        of_method = self.by_method.setdefault(drafter, AcceptanceByPosition())
        of_method.record(num_draft_tokens, num_accepted_tokens)


@dataclass(frozen=True)
class EngineStats:
    """The engine's load at one moment, and its counters since it started.

    accepted_by_position: accepted draft tokens by their position in the draft.
    drafted_by_position: verified ones, accepted or not, in the same way.
    last_batch_size: sequences that the last step brought tokens to.
    num_cached_tokens: prompt tokens whose KV the prefix cache had.
    num_prefill_chunks: rows that ended before the end of what was to be computed.
    num_lookahead_tokens: guesses run behind drafts, for what the target says after them.
    is_speculation_on: whether a request that says nothing about it gets drafts.
    num_speculation_flips: times that this has changed.
    decision: on the last step that decoded something; None where no policy decides.
    estimated_speedup: over no speculation, by the decision and batch of that step; None where no
        costs are known.
    estimated_tokens_per_s: of that batch, with the decision; None as above.
    decisions: such steps by reason. decided_lengths: by the number of draft tokens, 0 first.
    decision_changes: the latest changes, the oldest first.
    drafted_by_method, accepted_by_method: as by position, for each method that has drafted, and for
        STRUCTURED_OUTPUT.
    capacity_tokens_per_s: the most that a full batch is expected to yield; None if not measured.
    """

    num_running: int
    num_decoding: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_steps: int
    last_batch_size: int
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_prefill_chunks: int
    num_generated_tokens: int
    num_lookahead_tokens: int
    is_speculation_on: bool
    num_speculation_flips: int
    speculation: SpeculationStats
    accepted_by_position: tuple[int, ...]
    decision: Decision | None = None
    decisions: Mapping[DecisionReason, int] = field(default_factory=dict)
    decision_changes: tuple[DecisionChange, ...] = ()
    drafted_by_position: tuple[int, ...] = ()
    estimated_speedup: float | None = None
    estimated_tokens_per_s: float | None = None
    decided_lengths: tuple[int, ...] = ()
    drafted_by_method: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    accepted_by_method: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    capacity_tokens_per_s: float | None = None
