"""When a choice among draft shapes is compared with the others again."""

from __future__ import annotations

from specdec.speculation.policy.cost_model import CostModel, range_of
from specdec.types.draft_decision import DraftShape

_LEAST_DRAFTS = 16
"""Drafts of a shape in a range of batch sizes that are evidence of acceptance."""


class Reviews:
    """Reviews of a choice: from time to time, and once there is news.

    News are a batch in another range of sizes, and the first evidence of cost and acceptance there.
    With hundreds of sequences a step or two are enough for that.
    """

    def __init__(self, costs: CostModel, period_s: float) -> None:
        """costs: as the caller corrects them. period_s: longest time between reviews."""
        self._costs = costs
        self._period_s = period_s
        self._at_s = 0.0
        self._range = -1  # of batch sizes
        self._num_drafts = 0  # since the shape was chosen, or the range was another
        self._is_unobserved = False

    def is_due(self, now_s: float, num_decoding: int, chosen: DraftShape) -> bool:
        """Return whether to review the choice."""
        is_late = now_s - self._at_s >= self._period_s
        if is_late or range_of(num_decoding) != self._range:
            return True
        return self._is_unobserved and self.has_evidence(num_decoding, chosen)

    def has_evidence(self, num_decoding: int, chosen: DraftShape) -> bool:
        """Return whether there is evidence of cost and acceptance of the chosen drafts."""
        if self._num_drafts < _LEAST_DRAFTS:
            return False
        return self._costs.is_observed(num_decoding, chosen)

    def note(self, now_s: float, num_decoding: int, chosen: DraftShape) -> None:
        """Record a review."""
        if range_of(num_decoding) != self._range:
            self.begin(now_s, num_decoding)
        self._at_s = now_s
        self._is_unobserved &= not self.has_evidence(num_decoding, chosen)

    def begin(self, now_s: float, num_decoding: int) -> None:
        """Record that a shape was chosen, or the batch is in another range."""
        self._at_s, self._range = now_s, range_of(num_decoding)
        self._num_drafts, self._is_unobserved = 0, True

    def postpone(self, now_s: float) -> None:
        """Record a step that something else decides."""
        self._at_s = now_s

    def count_drafts(self, num_drafts: int) -> None:
        """Count verified drafts of the chosen shape."""
        self._num_drafts += num_drafts
