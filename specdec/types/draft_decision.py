"""What was decided about drafting, why, and when it changed."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

MAX_KEPT_CHANGES = 256
"""Of a timeline of changes, so many of the latest are kept."""


class DecisionReason(StrEnum):
    """Why a step drafts as much as it does.

    THRESHOLD: by the number of decoding requests, to either side of the threshold.
    TABLE_ROW: the number of a row of `num_speculative_tokens_per_batch_size`.
    GOODPUT: what promises most tokens a second. PROBE: a look at the number beside that.
    OPERATOR: a mode or number that an operator or the configuration has fixed. RULE: the same by a
    rule on the rate of requests.
    REQUEST: every request that decodes has opted out. DRAFTER_AWAY: the draft model is being
    started again. CATCHING_UP: drafts were asked for, and the draft model is not that far yet.
    """

    THRESHOLD = "threshold"
    TABLE_ROW = "table_row"
    GOODPUT = "goodput"
    PROBE = "probe"
    OPERATOR = "operator"
    RULE = "rule"
    REQUEST = "request"
    DRAFTER_AWAY = "drafter_away"
    CATCHING_UP = "catching_up"


@dataclass(frozen=True)
class Decision:
    """How many tokens a sequence may draft in a step; 0 turns drafting off for all.

    first_length: what sequences whose length follows their acceptance begin with; None where that
    is num_draft_tokens itself, which then bounds no one. Else nobody's draft is longer than
    num_draft_tokens, unless its request asks for that.
    """

    num_draft_tokens: int
    reason: DecisionReason
    first_length: int | None = None


@dataclass(frozen=True)
class DecisionChange:
    """From `at_s` on, by the policy's clock, another decision than before held.

    num_decoding: requests that decoded then.
    """

    at_s: float
    num_draft_tokens: int
    reason: DecisionReason
    num_decoding: int


class DecisionLog:
    """Counts decisions by reason and by number, and keeps a timeline of the changes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts: Counter[DecisionReason] = Counter()
        self._lengths: Counter[int] = Counter()
        self._changes: deque[DecisionChange] = deque(maxlen=MAX_KEPT_CHANGES)
        self._last: tuple[int, DecisionReason] | None = None

    def record(self, num_draft_tokens: int, reason: DecisionReason, num_decoding: int) -> None:
        """Counts one step's decision; keeps it where it differs from the step before."""
        self._counts[reason] += 1
        self._lengths[num_draft_tokens] += 1
        if self._last != (num_draft_tokens, reason):
            self._last = (num_draft_tokens, reason)
            at_s = self._clock()
            self._changes.append(DecisionChange(at_s, num_draft_tokens, reason, num_decoding))

    @property
    def counts(self) -> Mapping[DecisionReason, int]:
        """Steps by the reason of their decision; reasons that never held are left out."""
        return MappingProxyType(dict(self._counts))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Steps by the number of draft tokens decided on, 0 first, up to the largest so far."""
        return tuple(self._lengths[length] for length in range(max(self._lengths, default=-1) + 1))

    @property
    def changes(self) -> tuple[DecisionChange, ...]:
        """The latest changes, the oldest first."""
        return tuple(self._changes)
