"""Inertia of a choice among draft shapes: for how long a better one is not taken yet."""

from __future__ import annotations

from specdec.speculation.policy.cost_model import CostModel
from specdec.types.drafts.draft_decision import DraftShape, chain

CERTAIN_GAIN = 1.3
"""Expected gain of drafts above which no error of a profile is likely to hide a loss."""

_DWELL_STEPS = 50
"""Steps after which a change is settled, on a machine on which they take less than the dwell."""

_LASTING_S = 0.3
"""Time for which a smaller gain has to last before drafts begin: the drafter first has to catch up,
which a batch that is about to end does not repay."""


class Inertia:
    """Times between changes of the chosen shape, and since when another one is better."""

    def __init__(self, costs: CostModel, dwell_s: float) -> None:
        """dwell_s: least time between changes, _DWELL_STEPS steps if they take less.

        After a change to no draft it is twice that.
        """
        self._costs = costs
        self._dwell_s = dwell_s
        self._changed_at_s = 0.0
        self._gains_since_s: float | None = None  # None while the present shape is best

    def change(self, now_s: float) -> None:
        """Record a change."""
        self._changed_at_s, self._gains_since_s = now_s, None

    def settle(self) -> None:
        """Record that the present shape is best, or that something else decides."""
        self._gains_since_s = None

    def holds(self, now_s: float, num_decoding: int, chosen: DraftShape, gain: float) -> bool:
        """Return whether it is too early to change to a better shape. gain: over no draft."""
        if self._gains_since_s is None:
            self._gains_since_s = now_s
        is_new = gain < CERTAIN_GAIN and now_s - self._gains_since_s < _LASTING_S
        is_dwelling = now_s - self._changed_at_s < self._dwell(now_s, num_decoding, chosen)
        return is_dwelling or (is_new and chosen == chain(0))

    def _dwell(self, now_s: float, num_decoding: int, chosen: DraftShape) -> float:
        """Return the seconds for which a shape is kept unless it loses."""
        step_s = self._costs.step_s(num_decoding, chosen, now_s)
        dwell_s = min(self._dwell_s, _DWELL_STEPS * step_s)
        return dwell_s * (1 if chosen.num_draft_tokens else 2)
