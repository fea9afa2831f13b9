"""Probe: a trial of a shape that is not in use, whose cost is bounded by a share of the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.types.drafts.draft_decision import DraftShape, chain

_FIRST_PROBE_AFTER_S = 5.0
_LAST_PROBE_AFTER_S = 60.0
_MAX_PROBE_S = 1.0
_MAX_PROBE_STEPS = 12
"""A probe ends after the longer one of these, since a drafter may first have to catch up."""
_NUM_DRAFTS = 16
_NUM_STEPS = 6
_NUM_CHECK_STEPS = 3
_NEWS = 1.05
"""Ratio of a shape's goodput after a probe to that before which is a reason to try again soon."""
_PROBED_SHARE, _MOST_PROBED = 8, 4
"""While drafts do not pay, every eighth sequence drafts in a probe, at least one and at most four:
they are evidence of acceptance, and the others do not have to catch up."""

_MAX_LOST_SHARE = 0.01
"""Share of the time that probes may lose: it determines the wait for the next one."""
_MAX_WAIT_S = 300.0
"""Longest wait whatever was lost, since other load on the machine may have lost it."""
_MAX_DELAY_S = 5.0
"""Longest time for which a probe waits for a step without prompts."""


@dataclass
class Probe:
    """Periodic trial of a shape next to the chosen one.

    Probes detect that drafts would pay again, that a longer draft costs less than estimated, or
    that drafts do not pay after all. A probe ends after enough steps and drafts. Each probe without
    a change doubles the wait for the next, from five seconds to a minute, unless the shape was much
    better than expected. The wait is longer where the probe has lost more than a hundredth of it.

    A check is a short probe of no draft, out of turn.

    shape: None while no probe runs. goodput: its expected goodput when the probe began. lost_s: by
    the present probe or the last one; the next one begins no earlier than not_before_s. is_check:
    whether the present probe is one. is_whole: whether all sequences draft in it, although drafts
    are not expected to pay.
    """

    due_at_s: float
    wait_s: float = _FIRST_PROBE_AFTER_S
    shape: DraftShape | None = None
    goodput: float = 0.0
    ends_at_s: float = 0.0
    num_drafts_left: int = 0
    num_steps_left: int = 0
    num_begun: int = 0
    lost_s: float = 0.0
    not_before_s: float = 0.0
    is_check: bool = False
    is_whole: bool = False

    def restarted(self, now_s: float) -> Probe:
        """Return the probes beside another shape, of which the first begins soon."""
        due_at_s = max(now_s + _FIRST_PROBE_AFTER_S, self.not_before_s)
        return Probe(due_at_s, not_before_s=self.not_before_s)

    def is_due(self, now_s: float, *, has_prompts: bool) -> bool:
        """Return whether to begin a probe, in a step with or without prompt tokens."""
        return now_s >= self.due_at_s + (_MAX_DELAY_S if has_prompts else 0.0)

    def begin(
        self,
        now_s: float,
        shapes: Sequence[DraftShape],
        chosen: int,
        goodputs: Sequence[float],
        may_pay: Sequence[bool],
        step_s: float,
    ) -> None:
        """Begin a probe beside shapes[chosen], if there is one to try.

        In turn it is the shape above it, the one below, no draft, the trees, the chain as deep as a
        tree, and other drafts ahead with the same draft length.

        goodputs: of the shapes, as expected now. may_pay: whether each shape could be better than
        the chosen one. step_s: expected seconds of a step.
        """
        probed = _beside(shapes, chosen, may_pay)
        if not probed:
            return
        index = probed[self.num_begun % len(probed)]
        self.num_begun += 1
        self._begin(now_s, shapes[index], goodputs[index], step_s, _NUM_STEPS)

    def check(self, now_s: float, goodput: float, step_s: float) -> None:
        """Begin a check. goodput, step_s: expected of steps without drafts."""
        self._begin(now_s, chain(0), goodput, step_s, _NUM_CHECK_STEPS)
        self.is_check = True

    def _begin(
        self, now_s: float, shape: DraftShape, goodput: float, step_s: float, num_steps: int
    ) -> None:
        self.shape, self.goodput = shape, goodput
        self.is_check = self.is_whole = False
        self.ends_at_s = now_s + max(_MAX_PROBE_S, _MAX_PROBE_STEPS * step_s)
        self.num_drafts_left, self.num_steps_left = _NUM_DRAFTS, num_steps
        self.lost_s = 0.0

    def observe(self, lost_s: float, *, is_typical: bool) -> None:
        """Record a step of the probe, and the seconds by which it was worse than the chosen one.

        is_typical: whether it is evidence of the cost of the shape.
        """
        self.lost_s += lost_s
        self.num_steps_left -= is_typical

    def cancel(self, now_s: float) -> None:
        """End the probe, and begin the next one after the present wait."""
        self.shape = None
        owed_s = max(0.0, self.not_before_s - now_s)  # a check does not wait for what others lost
        wait_s = owed_s + max(0.0, self.lost_s) / _MAX_LOST_SHARE
        self.not_before_s = now_s + min(wait_s, _MAX_WAIT_S)
        self.due_at_s = max(now_s + self.wait_s, self.not_before_s)

    def end(self, now_s: float, goodput: float) -> None:
        """End a probe that has changed nothing. goodput: of its shape, as expected now."""
        has_news = goodput > _NEWS * self.goodput
        self.wait_s = _FIRST_PROBE_AFTER_S if has_news else self.wait_s
        self.cancel(now_s)
        self.wait_s = min(2 * self.wait_s, _LAST_PROBE_AFTER_S)

    def is_over(self, now_s: float, *, is_partial: bool) -> bool:
        """Return whether the probe has run for long enough.

        is_partial: whether only a few sequences draft, so that its steps are no evidence of costs.
        """
        has_steps = is_partial or self.num_steps_left <= 0
        is_known = has_steps and (self.num_drafts_left <= 0 or self.shape == chain(0))
        return is_known or now_s >= self.ends_at_s


def num_probed(num_decoding: int) -> int:
    """Return how many of the decoding sequences draft in a probe while drafts do not pay."""
    return min(_MOST_PROBED, max(1, num_decoding // _PROBED_SHARE))


def _beside(shapes: Sequence[DraftShape], chosen: int, may_pay: Sequence[bool]) -> list[int]:
    """Return the indices of the shapes to try beside the chosen one, those that may pay."""
    own = shapes[chosen]
    alike = [index for index, each in enumerate(shapes) if each.ahead is own.ahead]
    above = next((index for index in alike if index > chosen and may_pay[index]), None)
    below = chosen - 1 if chosen - 1 in alike else None
    others = [
        index
        for index, shape in enumerate(shapes)
        if index not in (0, chosen, above, below)
        and (shape.is_tree or shape.depth == max(1, own.depth))
    ]
    tried = dict.fromkeys((above, below, 0, *others))
    return [index for index in tried if index not in (None, chosen) and may_pay[index]]
