"""When a choice among draft shapes is compared with the others again."""

from __future__ import annotations

from collections import Counter

from specdec.speculation.policy.cost_model import range_of
from specdec.speculation.policy.expected_goodput import ExpectedGoodput
from specdec.types.drafts.draft_decision import DraftShape

_LEAST_DRAFTS = 16
"""Drafts of a shape in a range of batch sizes that are evidence of acceptance."""


class Reviews:
    """Reviews of a choice: from time to time, and once there is news.

    News are a batch in another range of sizes, and the first evidence of cost and acceptance there.
    With hundreds of sequences a step or two are enough for that. Evidence is kept by range, since
    a batch may leave a range in each step and return to it in the next.
    """

    def __init__(self, expected: ExpectedGoodput, period_s: float) -> None:
        """Set the evidence, which the caller updates, and the longest time between reviews."""
        self._expected = expected
        self._period_s = period_s
        self._at_s = 0.0
        self._range = -1  # of batch sizes
        self._num_drafts: Counter[int] = Counter()  # by range, since the shape was chosen
        self._reviewed: set[int] = set()  # ranges whose evidence was reviewed since then

    def is_due(self, now_s: float, num_decoding: int, chosen: DraftShape) -> bool:
        """Return whether to review the choice."""
        index = range_of(num_decoding)
        if now_s - self._at_s >= self._period_s or index != self._range:
            return True
        return index not in self._reviewed and self.has_evidence(num_decoding, chosen)

    def has_evidence(self, num_decoding: int, chosen: DraftShape) -> bool:
        """Return whether there is evidence of cost and acceptance of the chosen drafts."""
        if self._num_drafts[range_of(num_decoding)] < _LEAST_DRAFTS:
            return False
        return self._expected.is_observed(num_decoding, chosen)

    def note(self, now_s: float, num_decoding: int, chosen: DraftShape) -> None:
        """Record a review."""
        self._at_s, self._range = now_s, range_of(num_decoding)
        if self.has_evidence(num_decoding, chosen):
            self._reviewed.add(self._range)

    def begin(self, now_s: float, num_decoding: int) -> None:
        """Record that a shape was chosen."""
        self._at_s, self._range = now_s, range_of(num_decoding)
        self._num_drafts.clear()
        self._reviewed.clear()

    def postpone(self, now_s: float) -> None:
        """Record a step that something else decides."""
        self._at_s = now_s

    def count_drafts(self, num_decoding: int, num_drafts: int) -> None:
        """Count verified drafts of the chosen shape in a batch."""
        self._num_drafts[range_of(num_decoding)] += num_drafts
