"""Chooses the draft shape with the highest goodput: expected output tokens per second.

`expected_goodput` has what goodput is; for the choice of a length by it see also arXiv 2512.22420.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from specdec.speculation.policy.acceptance import AcceptanceEstimator
from specdec.speculation.policy.cost_model import CostModel
from specdec.speculation.policy.expected_goodput import ExpectedGoodput, StepTiming
from specdec.speculation.policy.inertia import CERTAIN_GAIN, Inertia
from specdec.speculation.policy.probe import Probe, num_probed
from specdec.speculation.policy.reviews import Reviews
from specdec.speculation.policy.slot_budget import SlotBudget
from specdec.types.drafts.draft_decision import (
    NO_PROMPTS,
    Decision,
    DecisionReason,
    DraftAhead,
    DraftShape,
    PromptLoad,
    chain,
)
from specdec.types.errors import InvalidValueError


class _Comparison(NamedTuple):
    """The goodput of each shape, and the best one.

    It is the present one, or no draft if that one loses, unless another is better by a margin.
    """

    goodputs: list[float]
    best: DraftShape
    is_losing: bool


class GoodputChooser:
    """argmax over draft shapes of expected tokens / step seconds, no draft included, with inertia.

    No draft is the safe choice. Another shape has to be better than it by a margin; once it is
    worse than none, it is left without delay. Where steps without drafts were not observed for a
    batch size, a few of them soon check whether drafts pay. In a step that also computes a part of
    a prompt, rows of drafts may cost more than they do without: then the step has none.

    Deterministic: the same calls with the same times choose the same shapes.
    """

    def __init__(
        self,
        costs: CostModel,
        *,
        margin: float = 0.03,
        entry_margin: float = 0.08,
        dwell_s: float = 1.0,
        review_s: float = 0.05,
        divides_slots: bool = False,
    ) -> None:
        """Set the inertia of the choice. Raises InvalidValueError for a negative number.

        margin: share by which another shape has to be better than the present one. entry_margin:
            the same where the present one is no draft: a drafter that has been off first has to
            catch up.
        dwell_s: least time between changes; see Inertia. A change to no draft takes none while
            drafts cost more than they yield.
        review_s: time between comparisons without news, which take some ten microseconds each.
        divides_slots: whether single sequences may have fewer draft tokens than the shape.
        """
        settings = {"margin": margin, "entry_margin": entry_margin}
        settings |= {"dwell_s": dwell_s, "review_s": review_s}
        for name, value in settings.items():
            if not value >= 0:
                raise InvalidValueError(name, value, "0 or a number above it")
        self._acceptance = AcceptanceEstimator()
        self._costs = costs
        self.expected = ExpectedGoodput(self._acceptance, costs)
        self._divides_slots = divides_slots
        self._margin = margin
        self._entry_margin = entry_margin
        self._inertia = Inertia(costs, dwell_s)
        self._reviews = Reviews(self.expected, review_s)
        self._chosen: DraftShape | None = None
        self._probe = Probe(0.0)
        self._num_decoding = 1  # of the present step
        self._num_accepted = 0  # in it
        self._has_prompts = False  # whether it has
        self._is_paused = False  # whether the last steps had none of the chosen drafts
        self._num_paying = 1  # decoding sequences for which drafts were last found to pay

    def choose(
        self,
        now_s: float,
        num_decoding: int,
        shapes: Sequence[DraftShape],
        prompts: PromptLoad = NO_PROMPTS,
    ) -> Decision:
        """Return the shape for the next step, chosen by goodput or a probe.

        num_decoding: 1 or more. shapes: chains by length, no draft first, then trees, the largest
            first, then chains for each kind of drafts ahead. prompts: that the step also computes.
        """
        self._num_decoding, self._num_accepted = num_decoding, 0
        self._has_prompts = prompts.num_tokens > 0
        if self._divides_slots:
            self.expected.renew_slots(now_s, num_decoding, shapes)
        if self._chosen not in shapes:
            best = self._compare(now_s, num_decoding, shapes).best
            self._change(now_s, num_decoding, best)
        elif self._probe.shape is not None:
            self._review_probe(now_s, num_decoding, shapes)
        elif self._is_review_due(now_s, num_decoding):
            self._review(now_s, num_decoding, shapes)
        chosen = self._chosen_for(now_s, num_decoding, prompts)
        probed = self._probe.shape
        if probed is None or probed not in shapes:
            return chosen
        decision = self._decision(now_s, num_decoding, probed, DecisionReason.PROBE)
        is_limited = not chosen.num_draft_tokens and probed.num_draft_tokens > 0
        is_limited &= not self._probe.is_whole
        return replace(decision, num_drafting=num_probed(num_decoding)) if is_limited else decision

    def _is_review_due(self, now_s: float, num_decoding: int) -> bool:
        """Return whether there may be news, or no prompts interrupt the chosen drafts any more."""
        assert self._chosen is not None
        is_resumed = self._is_paused and not self._has_prompts
        return is_resumed or self._reviews.is_due(now_s, num_decoding, self._chosen)

    def _chosen_for(self, now_s: float, num_decoding: int, prompts: PromptLoad) -> Decision:
        """Return the decision by goodput alone."""
        shape = self._chosen
        assert shape is not None
        pays_beside = self.expected.pays_beside
        if prompts.num_tokens and not pays_beside(prompts, now_s, num_decoding, shape):
            self._is_paused = True
            return Decision(chain(0), DecisionReason.PREFILL)
        self._is_paused = False
        return self._decision(now_s, num_decoding, shape, DecisionReason.GOODPUT)

    def shape_after(
        self, prompts: PromptLoad, now_s: float, shapes: Sequence[DraftShape]
    ) -> DraftShape | None:
        """Return the shape to draft after prompts, in a step in which no sequence decodes.

        It is the present one, or no draft where that is better once their sequences decode; None
        before the first choice, and where the present one is not among `shapes`.
        """
        present = self._chosen
        if present is None or present not in shapes:
            return None
        if not present.num_draft_tokens or not prompts.num_sequences:
            return present
        plain, drafted = self.expected.of(now_s, prompts.num_sequences, [chain(0), present])
        least = plain * self._least_gain(prompts.num_sequences)
        return present if drafted >= least else chain(0)

    def pause(self, now_s: float) -> None:
        """Cancel a probe and postpone the review, in a step that something else decides."""
        self._reviews.postpone(now_s)
        self._inertia.settle()
        if self._probe.shape is not None:
            self._probe.cancel(now_s)

    def observe_drafts(
        self,
        num_asked: int,
        num_accepted: int,
        now_s: float,
        tree_size: int = 0,
        *,
        num_drafts: int = 1,
    ) -> None:
        """Record steps of sequences; see `AcceptanceEstimator.record`."""
        self._acceptance.record(num_asked, num_accepted, now_s, tree_size, num_drafts=num_drafts)
        self._count_drafts(num_drafts, num_accepted)

    def observe_step(
        self, num_decoding: int, shape: DraftShape, timing: StepTiming, *, is_typical: bool = True
    ) -> None:
        """Record the seconds of a step, whose drafts have been observed.

        is_typical: False if it does not show what the shape costs.
        """
        if is_typical:
            self.expected.observe(num_decoding, shape, timing, self._num_accepted)
        if self._probe.shape is not None:
            lost_s = 0.0 if self._has_prompts else self._lost_s(num_decoding, timing)
            self._probe.observe(lost_s, is_typical=is_typical)

    def _lost_s(self, num_decoding: int, timing: StepTiming) -> float:
        """Return how much longer a step took than its tokens take with the chosen shape."""
        assert self._chosen is not None
        num_tokens = num_decoding + self._num_accepted
        [goodput] = self.expected.of(timing.ended_at_s, num_decoding, [self._chosen])
        return timing.seconds - num_tokens / goodput

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
        self._count_drafts(1, num_accepted)

    def _count_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Count drafts of which `num_accepted` tokens each were accepted."""
        self._probe.num_drafts_left -= num_drafts
        self._reviews.count_drafts(self._num_decoding, num_drafts)
        self._num_accepted += num_drafts * num_accepted

    @property
    def slots(self) -> SlotBudget | None:
        """The division of slots, which observes sequences; None where all have the same length."""
        return self.expected.slots if self._divides_slots else None

    def _decision(
        self, now_s: float, num_decoding: int, shape: DraftShape, reason: DecisionReason
    ) -> Decision:
        """Return the decision for a shape, with its slots and whether waiting for a draft pays."""
        if num_decoding > 1 or shape.ahead is DraftAhead.OFF:
            return Decision(shape, reason, slots=self.expected.slots.apply(shape))
        return Decision(shape, reason, waits=self.expected.pays_to_wait(now_s, shape))

    def _compare(
        self, now_s: float, num_decoding: int, shapes: Sequence[DraftShape]
    ) -> _Comparison:
        """Compare all shapes, and note the number of sequences if drafts pay for them.

        Another shape has to be better than the present one by a margin, and by more to replace no
        draft, unless its steps were observed in such a batch.
        """
        goodputs = self.expected.of(now_s, num_decoding, shapes)
        best = max(range(len(shapes)), key=lambda index: (goodputs[index], -index))
        base = self._base(num_decoding, shapes, goodputs)
        is_known = not base and self.expected.is_known(now_s, num_decoding, shapes[best])
        is_entry = (not base or self._is_paused) and not is_known
        margin = self._entry_margin if is_entry else self._margin
        if goodputs[best] <= goodputs[base] * (1 + margin):
            best = base
        if best:
            self._num_paying = num_decoding
        return _Comparison(goodputs, shapes[best], is_losing=shapes[base] != self._chosen)

    def _base(
        self, num_decoding: int, shapes: Sequence[DraftShape], goodputs: Sequence[float]
    ) -> int:
        """Return the index of the present shape, or of no draft where that is better."""
        present = shapes.index(self._chosen) if self._chosen in shapes else 0
        least = goodputs[0] * self._least_gain(num_decoding)
        return present if goodputs[present] >= least else 0

    def _least_gain(self, num_decoding: int) -> float:
        """Return the goodput over that of no draft at which the present drafts go on.

        It is that of an entry where prompts have interrupted them, and where twice as many
        sequences decode as they were last found to pay for: all the others first have to catch up.
        """
        is_entry = self._is_paused or num_decoding >= 2 * self._num_paying
        return 1 + self._entry_margin if is_entry else 1

    def _review(self, now_s: float, num_decoding: int, shapes: Sequence[DraftShape]) -> None:
        assert self._chosen is not None
        self._reviews.note(now_s, num_decoding, self._chosen)
        goodputs, best, is_losing = self._compare(now_s, num_decoding, shapes)
        gain = goodputs[shapes.index(best)] / goodputs[0]
        if self._may_lose(now_s, num_decoding, 1 + self._entry_margin):
            self._check(now_s, num_decoding, goodputs[0])
        elif best == self._chosen:
            self._inertia.settle()
            self._begin_probe(now_s, num_decoding, shapes, goodputs)
        elif is_losing or not self._inertia.holds(now_s, num_decoding, self._chosen, gain):
            self._change(now_s, num_decoding, best)

    def _may_lose(self, now_s: float, num_decoding: int, gain: float) -> bool:
        """Return whether the present drafts may gain less if steps without any are as profiled.

        It is False once such steps were observed. Without that, what makes drafts slow would count
        as slowness of the machine, of which steps without drafts have their share.
        """
        chosen = self._chosen
        assert chosen is not None
        if self._has_prompts or not chosen.num_draft_tokens:
            return False
        is_known = self.expected.is_observed(num_decoding, chain(0))
        if is_known or not self._reviews.has_evidence(num_decoding, chosen):
            return False
        return self.expected.least_gain(now_s, num_decoding, chosen) < gain

    def _check(self, now_s: float, num_decoding: int, goodput: float) -> None:
        """Begin a check. goodput: expected of no draft."""
        self._probe.check(now_s, goodput, self._costs.step_s(num_decoding, chain(0), now_s))

    def _begin_probe(
        self,
        now_s: float,
        num_decoding: int,
        shapes: Sequence[DraftShape],
        goodputs: Sequence[float],
    ) -> None:
        """Begin a probe beside the present shape if one is due, and there is another shape.

        It is a check where steps without drafts are unknown and drafts do not pay for certain.
        """
        if len(shapes) == 1 or not self._probe.is_due(now_s, has_prompts=self._has_prompts):
            return
        if self._may_lose(now_s, num_decoding, CERTAIN_GAIN):
            self._check(now_s, num_decoding, goodputs[0])
            return
        assert self._chosen is not None
        chosen = shapes.index(self._chosen)
        step_s = self._costs.step_s(num_decoding, self._chosen, now_s)
        may_pay = [
            self._may_pay(now_s, num_decoding, shape, goodputs[0], goodputs[chosen])
            for shape in shapes
        ]
        self._probe.begin(now_s, shapes, chosen, goodputs, may_pay, step_s)
        probed = self._probe.shape
        if probed is not None and not chosen and self._probe.num_begun > 1:  # acceptance is known
            least = goodputs[0] * (1 + self._entry_margin)
            may_pay_at = self.expected.may_be_cheaper
            self._probe.is_whole = may_pay_at(now_s, num_decoding, probed, least)

    def _may_pay(
        self, now_s: float, num_decoding: int, shape: DraftShape, plain: float, present: float
    ) -> bool:
        """Return whether a shape may be better than the present one in spite of the estimates.

        No draft may be unless it is expected to be far worse, and drafts in place of none if they
        would be with all tokens accepted. plain, present: goodput of no draft and of the present
        shape.
        """
        if not shape.num_draft_tokens:
            return present < CERTAIN_GAIN * plain
        if self._chosen != chain(0):
            return True
        most = self.expected.most(now_s, num_decoding, shape)
        return most > plain * (1 + self._entry_margin)

    def _review_probe(self, now_s: float, num_decoding: int, shapes: Sequence[DraftShape]) -> None:
        is_partial = self._chosen == shapes[0] and num_decoding > num_probed(num_decoding)
        is_partial &= not self._probe.is_whole
        if not self._probe.is_over(now_s, is_partial=is_partial):
            return
        goodputs, best, _ = self._compare(now_s, num_decoding, shapes)
        probed = self._probe.shape
        if probed in shapes and not self._probe.is_check:
            self._probe.end(now_s, goodputs[shapes.index(probed)])
        else:
            self._probe.cancel(now_s)
        if best != self._chosen:
            self._change(now_s, num_decoding, best)

    def _change(self, now_s: float, num_decoding: int, chosen: DraftShape) -> None:
        """Change the shape, and probe beside it soon, but within the share that probes may lose."""
        self._chosen = chosen
        self._inertia.change(now_s)
        self._reviews.begin(now_s, num_decoding)
        self._probe = self._probe.restarted(now_s)
