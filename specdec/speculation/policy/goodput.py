"""Chooses the draft shape with the highest goodput: expected output tokens per second.

Goodput is the expected tokens of a step over its expected seconds (SmartSpec, Liu et al. 2024,
arXiv 2406.14066, section 4; for the choice of a length by it also arXiv 2512.22420). Both are
measured: the tokens by acceptance at each position, the seconds by batch size and draft shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.speculation.policy.acceptance import AcceptanceEstimator
from specdec.speculation.policy.cost_model import CostModel, StepSeconds
from specdec.types.draft_decision import (
    Decision,
    DecisionReason,
    DraftAhead,
    DraftShape,
    chain,
)
from specdec.types.errors import InvalidValueError

_FIRST_PROBE_AFTER_S = 5.0
_LAST_PROBE_AFTER_S = 60.0
_PROBE_S = 1.0
_PROBE_DRAFTS = 32
_PROBE_STEPS = 6

_ESTIMATE_HOLDS_S = 0.5


@dataclass(frozen=True)
class GoodputEstimate:
    """Expected goodput of steps of one kind, estimated at `at_s`.

    num_decoding, shape: the kind, by sequences and draft shape of each. tokens_per_s: of the whole
        batch. speedup: over the same steps without drafts.
    """

    at_s: float
    num_decoding: int
    shape: DraftShape
    tokens_per_s: float
    speedup: float

    def is_valid_for(self, now_s: float, num_decoding: int, shape: DraftShape) -> bool:
        """Return whether the estimate is recent and for such steps."""
        is_of_the_kind = (self.num_decoding, self.shape) == (num_decoding, shape)
        return is_of_the_kind and now_s - self.at_s < _ESTIMATE_HOLDS_S


@dataclass
class _Probe:
    """Periodic trial of a shape next to the chosen one.

    Probes detect that drafts would pay again, or that a longer one costs less than estimated. A
    probe ends after enough steps and drafts, at the latest after a second, since a draft model may
    first have to catch up. Each probe without a change doubles the wait for the next, from five
    seconds to a minute, which bounds their cost.
    """

    due_at_s: float
    wait_s: float = _FIRST_PROBE_AFTER_S
    shape: DraftShape | None = None  # None while no probe runs
    ends_at_s: float = 0.0
    num_drafts_left: int = 0
    num_steps_left: int = 0
    num_begun: int = 0

    def begin(self, now_s: float, shapes: Sequence[DraftShape], chosen: int) -> None:
        """Begin a probe above shapes[chosen], then below it, of a tree, and of other drafts ahead.

        Of these it is the one with the same number of draft tokens.
        """
        own = shapes[chosen]
        beside = [
            each
            for each in (chosen + 1, chosen - 1)
            if 0 <= each < len(shapes) and shapes[each].ahead is own.ahead
        ]
        others = [
            index
            for index, shape in enumerate(shapes)
            if index not in (chosen, *beside) and (shape.is_tree or _differ_in_ahead(shape, own))
        ]
        probed = [*beside, *others]
        self.shape = shapes[probed[self.num_begun % len(probed)]]
        self.num_begun += 1
        self.ends_at_s = now_s + _PROBE_S
        self.num_drafts_left, self.num_steps_left = _PROBE_DRAFTS, _PROBE_STEPS

    def cancel(self, now_s: float) -> None:
        self.shape = None
        self.due_at_s = now_s + self.wait_s

    def end(self, now_s: float) -> None:
        self.cancel(now_s)
        self.wait_s = min(2 * self.wait_s, _LAST_PROBE_AFTER_S)

    def is_over(self, now_s: float) -> bool:
        is_known = self.num_steps_left <= 0 and (
            self.num_drafts_left <= 0 or self.shape == chain(0)
        )
        return is_known or now_s >= self.ends_at_s


def _differ_in_ahead(shape: DraftShape, chosen: DraftShape) -> bool:
    """Return whether a shape differs from the chosen one in what is drafted ahead alone."""
    return shape.ahead is not chosen.ahead and shape.depth == max(1, chosen.depth)


class GoodputChooser:
    """argmax over draft shapes of expected tokens / step seconds, no draft included, with inertia.

    Deterministic: the same calls with the same times choose the same shapes.
    """

    def __init__(
        self,
        costs: CostModel,
        *,
        margin: float = 0.03,
        dwell_s: float = 1.0,
        review_s: float = 0.05,
    ) -> None:
        """Set the inertia of the choice. Raises InvalidValueError for a negative number.

        margin: share by which another shape has to be better than the present one.
        dwell_s: least time between changes. review_s: time between comparisons, each of which takes
            some ten microseconds; a decision in between only reads the clock.
        """
        for name, value in (("margin", margin), ("dwell_s", dwell_s), ("review_s", review_s)):
            if not value >= 0:
                raise InvalidValueError(name, value, "0 or a number above it")
        self._costs = costs
        self._margin = margin
        self._dwell_s = dwell_s
        self._review_s = review_s
        self._acceptance = AcceptanceEstimator()
        self._estimate: GoodputEstimate | None = None
        self._chosen: DraftShape | None = None
        self._changed_at_s = 0.0
        self._reviewed_at_s = 0.0
        self._probe = _Probe(0.0)

    def choose(self, now_s: float, num_decoding: int, shapes: Sequence[DraftShape]) -> Decision:
        """Return the shape for the next step, chosen by goodput or a probe.

        num_decoding: 1 or more. shapes: chains by ascending length, no draft first, then trees,
            then chains for each kind of drafts ahead.
        """
        if self._chosen not in shapes:
            self._change(now_s, self._best(now_s, num_decoding, shapes))
        elif self._probe.shape is not None:
            self._review_probe(now_s, num_decoding, shapes)
        elif now_s - self._reviewed_at_s >= self._review_s:
            self._review(now_s, num_decoding, shapes)
        probed = self._probe.shape
        if probed is not None and probed in shapes:
            return self._decision(now_s, num_decoding, probed, DecisionReason.PROBE)
        assert self._chosen is not None
        return self._decision(now_s, num_decoding, self._chosen, DecisionReason.GOODPUT)

    def pause(self, now_s: float) -> None:
        """Cancel a probe and postpone the review, in a step that something else decides."""
        self._reviewed_at_s = now_s
        if self._probe.shape is not None:
            self._probe.cancel(now_s)

    def observe_drafts(
        self, num_asked: int, num_accepted: int, now_s: float, *, is_tree: bool = False
    ) -> None:
        """Record one sequence's step, in which it was to draft `num_asked` tokens in a row."""
        self._acceptance.record(num_asked, num_accepted, now_s, is_tree=is_tree)
        self._probe.num_drafts_left -= 1

    def observe_step(
        self, num_decoding: int, shape: DraftShape, seconds: float, now_s: float
    ) -> None:
        """Record the seconds of a step without prefill."""
        self._costs.observe(num_decoding, shape, seconds, now_s)
        self._probe.num_steps_left -= 1

    def observe_ahead(
        self,
        shape: DraftShape,
        num_asked: int,
        num_drafted: int,
        num_accepted: int,
        now_s: float,
        *,
        is_hit: bool,
    ) -> None:
        """Record one sequence's step of a shape with drafts ahead.

        The arguments are those of `AcceptanceEstimator.record_ahead`.
        """
        self._acceptance.record_ahead(
            shape, num_asked, num_drafted, num_accepted, now_s, is_hit=is_hit
        )
        self._probe.num_drafts_left -= 1

    @property
    def observed(self) -> StepSeconds:
        """Seconds of the observed steps, and those that the profiled table has for them."""
        return self._costs.observed

    def goodputs(
        self, now_s: float, num_decoding: int, shapes: Sequence[DraftShape]
    ) -> list[float]:
        """Return the expected tokens per second over the batch, for each shape."""
        expected = self._acceptance.expected_tokens(shapes, now_s)
        return [
            max(
                num_decoding * tokens / self._costs.step_s(num_decoding, shape, now_s),
                self._waiting_goodput(now_s, num_decoding, shape),
            )
            for shape, tokens in zip(shapes, expected, strict=True)
        ]

    def _waiting_goodput(self, now_s: float, num_decoding: int, shape: DraftShape) -> float:
        """Return the goodput of a sequence alone that waits for drafts that were not made ahead.

        0 where it does not wait.
        """
        if num_decoding > 1 or shape.ahead is DraftAhead.OFF:
            return 0.0
        waited_s = (1 - self._acceptance.hit_rate(shape)) * self._costs.draft_s(1, shape)
        step_s = self._costs.step_s(1, shape, now_s)
        return self._acceptance.tokens_of_hit(shape) / (step_s + waited_s)

    def _decision(
        self, now_s: float, num_decoding: int, shape: DraftShape, reason: DecisionReason
    ) -> Decision:
        """Return the decision for a shape, with whether waiting for a draft pays."""
        if num_decoding > 1 or shape.ahead is DraftAhead.OFF:
            return Decision(shape, reason)
        [tokens] = self._acceptance.expected_tokens([shape], now_s)
        goodput = tokens / self._costs.step_s(1, shape, now_s)
        waits = self._waiting_goodput(now_s, 1, shape) >= goodput
        return Decision(shape, reason, waits=waits)

    def estimate(self, now_s: float, num_decoding: int, shape: DraftShape) -> GoodputEstimate:
        """Return the estimate for a kind of step, updated twice a second and when the kind changes.

        A step with drafts counts as at least as long as one without, whatever the noise.
        """
        known = self._estimate
        if known is not None and known.is_valid_for(now_s, num_decoding, shape):
            return known
        plain_s = self._costs.step_s(num_decoding, chain(0), now_s)
        step_s = self._costs.step_s(num_decoding, shape, now_s)
        [goodput] = self.goodputs(now_s, num_decoding, [shape])
        tokens_per_s = goodput * step_s / max(plain_s, step_s)
        self._estimate = GoodputEstimate(
            now_s,
            num_decoding,
            shape,
            tokens_per_s=tokens_per_s,
            speedup=tokens_per_s * plain_s / num_decoding,
        )
        return self._estimate

    def _best(self, now_s: float, num_decoding: int, shapes: Sequence[DraftShape]) -> DraftShape:
        """Return the best shape; the present one unless another is better by the margin."""
        goodputs = self.goodputs(now_s, num_decoding, shapes)
        best = max(range(len(shapes)), key=lambda index: (goodputs[index], -index))
        present = self._chosen
        if present is None or present not in shapes:
            return shapes[best]
        least = goodputs[shapes.index(present)] * (1 + self._margin)
        return shapes[best] if goodputs[best] > least else present

    def _review(self, now_s: float, num_decoding: int, shapes: Sequence[DraftShape]) -> None:
        self._reviewed_at_s = now_s
        if now_s - self._changed_at_s < self._dwell_s:
            return
        best = self._best(now_s, num_decoding, shapes)
        if best != self._chosen:
            self._change(now_s, best)
        elif now_s >= self._probe.due_at_s and len(shapes) > 1:
            self._probe.begin(now_s, shapes, shapes.index(best))

    def _review_probe(self, now_s: float, num_decoding: int, shapes: Sequence[DraftShape]) -> None:
        if not self._probe.is_over(now_s):
            return
        self._probe.end(now_s)
        best = self._best(now_s, num_decoding, shapes)
        if best != self._chosen:
            self._change(now_s, best)

    def _change(self, now_s: float, chosen: DraftShape) -> None:
        """Change the shape, and probe on both sides of it soon."""
        self._chosen, self._changed_at_s, self._reviewed_at_s = chosen, now_s, now_s
        self._probe = _Probe(now_s + _FIRST_PROBE_AFTER_S)
