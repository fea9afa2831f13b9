"""Decisions of a speculation policy: the shape of drafts, the reason, and a log of changes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

from specdec.types.drafts.draft_tree import num_growth_slots
from specdec.types.drafts.slot_rule import SlotRule

MAX_KEPT_CHANGES = 256
"""Length of the timeline of changes; the oldest are dropped."""


class DecisionReason(StrEnum):
    """Reason for the shape of a step's drafts.

    THRESHOLD: the number of decoding requests, on either side of the threshold.
    TABLE_ROW: a row of `num_speculative_tokens_per_batch_size`.
    GOODPUT: the shape with the highest expected tokens per second.
    PROBE: a trial of the shape next to that one.
    PREFILL: drafts do not pay in a step that also computes a part of a prompt.
    OPERATOR: a mode or number that an operator or the configuration has fixed.
    RULE: the same by a rule on the rate of requests.
    REQUEST: every decoding request has opted out.
    DRAFTER_UNAVAILABLE: the draft worker is restarting.
    CATCHING_UP: drafts were requested, and the draft model has not caught up yet.
    """

    THRESHOLD = "threshold"
    TABLE_ROW = "table_row"
    GOODPUT = "goodput"
    PROBE = "probe"
    PREFILL = "prefill"
    OPERATOR = "operator"
    RULE = "rule"
    REQUEST = "request"
    DRAFTER_UNAVAILABLE = "drafter_unavailable"
    CATCHING_UP = "catching_up"


class DraftAhead(StrEnum):
    """The drafts that a draft model makes after the rows that the target runs.

    OFF: nothing. It drafts once a step is verified, and the next step waits for it.
    CONTINUING: after all drafts of a row and the token that it expects the target to add (PEARL,
        Liu et al. 2024, arXiv 2408.11850).
    OUTCOMES: after the likeliest tokens that the target may add to each number of accepted drafts
        (speculative speculative decoding, Kumar et al. 2026).
    """

    OFF = "off"
    CONTINUING = "continuing"
    OUTCOMES = "outcomes"


class DraftShape(NamedTuple):
    """Shape of one sequence's draft, among which a policy chooses.

    num_draft_tokens: tokens that the target verifies, which determine the cost of a step; 0 for no
        draft. depth: most of them that can be accepted; less than their number in a tree.
    ahead: what a draft model drafts meanwhile for the step after it.
    """

    num_draft_tokens: int
    depth: int
    ahead: DraftAhead = DraftAhead.OFF

    def with_ahead(self, ahead: DraftAhead) -> DraftShape:
        """Return the shape with drafts ahead; one without draft tokens has none."""
        return self._replace(ahead=ahead) if self.num_draft_tokens else self

    @property
    def is_tree(self) -> bool:
        """Return whether it has more tokens than a chain of its depth."""
        return self.num_draft_tokens > self.depth

    @property
    def num_head_slots(self) -> int:
        """KV slots that a head with attention writes after the known tokens while it drafts."""
        if not self.is_tree:
            return self.num_draft_tokens
        return num_growth_slots(self.num_draft_tokens, self.depth)


@cache
def chain(num_draft_tokens: int) -> DraftShape:
    """Return the shape of a chain; 0 tokens for no draft."""
    return DraftShape(num_draft_tokens, depth=num_draft_tokens)


@cache
def tree(num_draft_tokens: int, depth: int) -> DraftShape:
    """Return the shape of a tree; a chain of `depth` where that needs as many tokens, or none."""
    is_chain = depth == 0 or num_draft_tokens <= depth
    return chain(depth) if is_chain else DraftShape(num_draft_tokens, depth)


@cache
def chains(most: int) -> tuple[DraftShape, ...]:
    """Return the chains of 0 to `most` tokens, the shortest first."""
    return tuple(chain(count) for count in range(most + 1))


_TREE_ROWS = (32, 16, 8)
"""Rows of a sequence in steps with smaller trees, as many as the graphs of a GPU have."""


@cache
def trees(most: int, depth: int, *, is_fixed: bool = False) -> tuple[DraftShape, ...]:
    """Return the trees of a depth with up to `most` tokens, the largest first; none for chains.

    is_fixed: whether the shape of the largest is given, so that there is no other one.
    """
    rows = () if is_fixed else _TREE_ROWS
    smaller = (each - 1 for each in rows if depth < each - 1 and 3 * each <= 2 * most)
    sizes = (most, *smaller) if most > depth > 0 else ()
    return tuple(tree(size, depth) for size in sizes)


class PromptLoad(NamedTuple):
    """Prompts that are computed beside the decoding sequences.

    num_tokens: most that the next step may run. num_sequences: those whose prompts they are; they
    will decode too.
    """

    num_tokens: int = 0
    num_sequences: int = 0


NO_PROMPTS = PromptLoad()


@dataclass(frozen=True)
class Decision:
    """Shape of the drafts of a step; one without tokens turns drafting off for all sequences.

    first_length: initial length for sequences whose length follows their acceptance; None if that
        is num_draft_tokens, which then is no upper bound for them. Otherwise no draft is longer
        than num_draft_tokens, unless its request asks for more.
    waits: whether a sequence that decodes alone waits for a draft that was not made ahead.
    num_drafting: most sequences that draft, the first in rank; None for all.
    slots: which draft tokens of a sequence are worth verifying; None for all.
    """

    shape: DraftShape
    reason: DecisionReason
    first_length: int | None = None
    waits: bool = True
    num_drafting: int | None = None
    slots: SlotRule | None = None

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that a sequence may draft."""
        return self.shape.num_draft_tokens

    @property
    def ahead(self) -> DraftAhead:
        """The drafts that a draft model makes meanwhile for the step after it."""
        return self.shape.ahead

    def drafts_like(self, other: Decision) -> bool:
        """Return whether both ask the same sequences for drafts of the same shape."""
        return (self.shape, self.num_drafting) == (other.shape, other.num_drafting)

    def may_wait(self, num_rows: int) -> bool:
        """Return whether a step of `num_rows` may wait for drafts.

        Drafts that are not made ahead are always waited for. Otherwise no row waits for the draft
        of another.
        """
        return self.ahead is DraftAhead.OFF or (self.waits and num_rows == 1)

    @property
    def allows_predictions(self) -> bool:
        """Return whether predicted output is drafted.

        It is unless load or an operator turns drafts off. A policy that expects nothing of the
        drafter, or a drafter that is down, is no evidence about a text that a client predicts.
        """
        return self.num_draft_tokens > 0 or self.reason in _ABOUT_THE_DRAFTER


_ABOUT_THE_DRAFTER = frozenset(
    {
        DecisionReason.GOODPUT,
        DecisionReason.PROBE,
        DecisionReason.PREFILL,
        DecisionReason.DRAFTER_UNAVAILABLE,
    }
)

NO_DRAFTS = Decision(chain(0), DecisionReason.OPERATOR)
"""Decision where nothing drafts."""


@dataclass(frozen=True)
class DecisionChange:
    """Change of the decision at `at_s` by the policy's clock.

    num_decoding: requests that decoded then.
    """

    at_s: float
    num_draft_tokens: int
    reason: DecisionReason
    num_decoding: int


class DecisionLog:
    """Counts of decisions by reason and by draft length, and a timeline of changes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts: Counter[DecisionReason] = Counter()
        self._lengths: Counter[int] = Counter()
        self._changes: deque[DecisionChange] = deque(maxlen=MAX_KEPT_CHANGES)
        self._last: tuple[int, DecisionReason] | None = None

    def record(self, num_draft_tokens: int, reason: DecisionReason, num_decoding: int) -> None:
        """Count one step's decision, and add a change where it differs from the step before."""
        self._counts[reason] += 1
        self._lengths[num_draft_tokens] += 1
        if self._last != (num_draft_tokens, reason):
            self._last = (num_draft_tokens, reason)
            at_s = self._clock()
            self._changes.append(DecisionChange(at_s, num_draft_tokens, reason, num_decoding))

    @property
    def counts(self) -> Mapping[DecisionReason, int]:
        """Steps by the reason of their decision, without reasons that never occurred."""
        return MappingProxyType(dict(self._counts))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Steps by draft length, from 0 up to the largest so far."""
        return tuple(self._lengths[length] for length in range(max(self._lengths, default=-1) + 1))

    @property
    def changes(self) -> tuple[DecisionChange, ...]:
        """The latest changes, oldest first."""
        return tuple(self._changes)
