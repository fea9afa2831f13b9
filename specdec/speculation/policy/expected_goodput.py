"""Expected goodput of draft shapes: output tokens per second, from acceptance and step costs.

Goodput is the expected tokens of a step over its expected seconds (SmartSpec, Liu et al. 2024,
arXiv 2406.14066, section 4). Both are measured: the tokens by acceptance at each position, the
seconds by batch size and draft shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specdec.speculation.policy.acceptance import AcceptanceEstimator
from specdec.speculation.policy.cost_model import CostModel
from specdec.speculation.policy.slot_budget import SlotBudget
from specdec.types.drafts.draft_decision import DraftAhead, DraftShape, PromptLoad, chain

_ESTIMATE_HOLDS_S = 0.5
_BESIDE_PROMPTS_HOLDS_S = 0.05
_MOST_OVERESTIMATED = 3.0
"""Largest factor by which a table that no step has corrected may overestimate drafts."""

_LEAST_RETURN_BESIDE_PROMPTS = 2.0
"""Least seconds that drafts have to save later for each second by which they delay prompts: no
table has what they cost there, as a head runs the tokens of the prompts too, and the sequences that
are still to come make later tokens cheaper."""


@dataclass(frozen=True)
class GoodputEstimate:
    """Expected goodput of steps of one kind, estimated at `at_s`.

    num_decoding, shape: the kind, by sequences and draft shape of each. tokens_per_s: of the whole
        batch. speedup: over the same steps without drafts. profile_error: seconds of such a step,
        as the last ones took, over those of the table of the start; None before any step.
    """

    at_s: float
    num_decoding: int
    shape: DraftShape
    tokens_per_s: float
    speedup: float
    profile_error: float | None = None


class _BesidePrompts(NamedTuple):
    """A decision, made at `at_s`, for steps that also compute a part of a prompt.

    num_decoding, shape: as in GoodputEstimate. pays: whether the drafts do.
    """

    at_s: float
    num_decoding: int
    shape: DraftShape
    pays: bool


def _is_valid(
    known: GoodputEstimate | _BesidePrompts,
    now_s: float,
    num_decoding: int,
    shape: DraftShape,
    holds_s: float,
) -> bool:
    """Return whether an estimate or decision is for such steps, and at most `holds_s` old."""
    is_of_the_kind = (known.num_decoding, known.shape) == (num_decoding, shape)
    return is_of_the_kind and now_s - known.at_s < holds_s


class StepTiming(NamedTuple):
    """When a step ended, its seconds, and those that it has waited for drafts before.

    drafted_s: those of its seconds in which a draft model made its drafts; 0 where not known.
    num_rows: draft tokens of a sequence, on average; None for those of the shape.
    """

    ended_at_s: float
    seconds: float
    waited_s: float = 0.0
    drafted_s: float = 0.0
    num_rows: float | None = None


class ExpectedGoodput:
    """Expected output tokens per second of steps, by number of sequences and draft shape.

    acceptance, costs: the measurements that it is computed from, which the caller updates.
    """

    def __init__(self, acceptance: AcceptanceEstimator, costs: CostModel) -> None:
        self.acceptance = acceptance
        self.costs = costs
        self.slots = SlotBudget()
        self._estimate: GoodputEstimate | None = None
        self._beside_prompts: _BesidePrompts | None = None
        self._cost_shares: dict[tuple[int, DraftShape], tuple[float, float]] = {}  # time and share

    def observe(
        self, num_decoding: int, shape: DraftShape, timing: StepTiming, num_accepted: int
    ) -> None:
        """Record the seconds of a step without prefill, and what its tokens take without drafts.

        num_accepted: draft tokens, of all sequences.
        """
        self.costs.observe(
            num_decoding,
            shape,
            timing.seconds,
            timing.ended_at_s,
            drafted_s=timing.drafted_s,
            num_rows=timing.num_rows,
        )
        undrafted_s = timing.seconds
        if shape.num_draft_tokens:
            share = self._cost_share(num_decoding, shape, timing.ended_at_s)
            undrafted_s *= share * (1 + num_accepted / num_decoding)
        self.costs.observed.spent += timing.seconds + timing.waited_s
        self.costs.observed.undrafted += undrafted_s

    def _cost_share(self, num_decoding: int, shape: DraftShape, now_s: float) -> float:
        """Return the seconds of a step without drafts over those with them: at most 1.

        The ratio filters slow steps: what slows one down is slow without drafts too. It is computed
        twice a second for each kind of step.
        """
        at_s, share = self._cost_shares.get((num_decoding, shape), (-math.inf, 1.0))
        if now_s - at_s >= _ESTIMATE_HOLDS_S:
            plain_s = self.costs.step_s(num_decoding, chain(0), now_s)
            share = min(1.0, plain_s / self._step_s(now_s, num_decoding, shape))
            self._cost_shares[num_decoding, shape] = now_s, share
        return share

    def of(self, now_s: float, num_decoding: int, shapes: Sequence[DraftShape]) -> list[float]:
        """Return the expected tokens per second over the batch, for each shape."""
        expected = self._tokens(now_s, shapes)
        return [
            max(
                num_decoding * tokens / self._step_s(now_s, num_decoding, shape),
                self._waiting_goodput(now_s, num_decoding, shape),
            )
            for shape, tokens in zip(shapes, expected, strict=True)
        ]

    def renew_slots(self, now_s: float, num_decoding: int, shapes: Sequence[DraftShape]) -> None:
        """Divide the slots of each shape again, if that is due."""
        if not self.slots.is_due(now_s, num_decoding):
            return
        expected = self.acceptance.expected_tokens(shapes, now_s)

        def step_s(shape: DraftShape, num_rows: float | None) -> float:
            return self.costs.step_s(num_decoding, shape, now_s, num_rows)

        self.slots.renew(now_s, num_decoding, dict(zip(shapes, expected, strict=True)), step_s)

    def _tokens(self, now_s: float, shapes: Sequence[DraftShape]) -> list[float]:
        """Return the expected tokens of a sequence and step, of the slots of each shape."""
        expected = self.acceptance.expected_tokens(shapes, now_s)
        plans = map(self.slots.plan, shapes)
        return [
            tokens if plan is None else 1 + plan.num_accepted
            for tokens, plan in zip(expected, plans, strict=True)
        ]

    def _step_s(self, now_s: float, num_decoding: int, shape: DraftShape) -> float:
        """Return the expected seconds of a step, of the slots of the shape."""
        return self.costs.step_s(num_decoding, shape, now_s, self._num_rows(shape))

    def _num_rows(self, shape: DraftShape) -> float | None:
        """Return the draft tokens of a sequence by the plan of a shape; None for all."""
        plan = self.slots.plan(shape)
        return None if plan is None or plan.rule is None else plan.num_rows

    def is_known(self, now_s: float, num_decoding: int, shape: DraftShape) -> bool:
        """Return whether steps of the shape, as planned, were observed in the last minutes."""
        return self.costs.is_known(num_decoding, shape, now_s, self._num_rows(shape))

    def is_observed(self, num_decoding: int, shape: DraftShape) -> bool:
        """Return whether they ever were."""
        return self.costs.is_observed(num_decoding, shape, self._num_rows(shape))

    def most(self, now_s: float, num_decoding: int, shape: DraftShape) -> float:
        """Return the tokens per second of a shape if all drafts were accepted."""
        most_tokens = num_decoding * (1 + shape.depth)
        return most_tokens / self.costs.step_s(num_decoding, shape, now_s)

    def may_be_cheaper(
        self, now_s: float, num_decoding: int, shape: DraftShape, least: float
    ) -> bool:
        """Return whether the goodput is above `least` if drafts cost a third of the estimate.

        False where steps of the shape were observed.
        """
        if self.is_known(now_s, num_decoding, shape):
            return False
        [tokens] = self._tokens(now_s, [shape])
        plain_s = self.costs.step_s(num_decoding, chain(0), now_s)
        added_s = self._step_s(now_s, num_decoding, shape) - plain_s
        return num_decoding * tokens > least * (plain_s + added_s / _MOST_OVERESTIMATED)

    def least_gain(self, now_s: float, num_decoding: int, shape: DraftShape) -> float:
        """Return the goodput of a shape over that of steps without drafts that are as profiled.

        Without drafts, steps may be faster than that, but not slower.
        """
        plain = num_decoding / self.costs.least_step_s(num_decoding, chain(0), now_s)
        [goodput] = self.of(now_s, num_decoding, [shape])
        return goodput / plain

    def pays_to_wait(self, now_s: float, shape: DraftShape) -> bool:
        """Return whether a sequence that decodes alone waits for drafts that were not made ahead.

        shape: one with drafts ahead.
        """
        [tokens] = self.acceptance.expected_tokens([shape], now_s)
        goodput = tokens / self.costs.step_s(1, shape, now_s)
        return self._waiting_goodput(now_s, 1, shape) >= goodput

    def _waiting_goodput(self, now_s: float, num_decoding: int, shape: DraftShape) -> float:
        """Return the goodput of a sequence alone that waits for drafts that were not made ahead.

        0 where it does not wait.
        """
        if num_decoding > 1 or shape.ahead is DraftAhead.OFF:
            return 0.0
        missed = 1 - self.acceptance.hit_rate(shape, waits=True)
        seconds = self.costs.step_s(1, shape, now_s) + missed * self.costs.draft_s(1, shape)
        return self.acceptance.tokens_of_hit(shape) / seconds

    def pays_beside(
        self, prompts: PromptLoad, now_s: float, num_decoding: int, shape: DraftShape
    ) -> bool:
        """Return whether the drafts of a shape pay in a step that also computes prompts.

        They pay where they cost at most half of what their accepted tokens would in later steps
        without drafts, in which the sequences of the prompts decode too.
        """
        known = self._beside_prompts
        if not shape.num_draft_tokens:
            return True
        holds_s = _BESIDE_PROMPTS_HOLDS_S
        if known is not None and _is_valid(known, now_s, num_decoding, shape, holds_s):
            return known.pays
        plain_s, drafted_s = (
            self.costs.step_s(num_decoding, each, now_s)
            + self.costs.prompt_s(num_decoding, each.num_draft_tokens, prompts.num_tokens, now_s)
            for each in (chain(0), shape)
        )
        [tokens] = self.acceptance.expected_tokens([shape], now_s)
        num_later = num_decoding + prompts.num_sequences
        token_s = self.costs.step_s(num_later, chain(0), now_s) / num_later
        saved_s = num_decoding * (tokens - 1) * token_s
        pays = saved_s > _LEAST_RETURN_BESIDE_PROMPTS * (drafted_s - plain_s)
        self._beside_prompts = _BesidePrompts(now_s, num_decoding, shape, pays)
        return pays

    def estimate(self, now_s: float, num_decoding: int, shape: DraftShape) -> GoodputEstimate:
        """Return the estimate for a kind of step, updated twice a second and when the kind changes.

        A step with drafts counts as at least as long as one without, whatever the noise.
        """
        known = self._estimate
        if known is not None and _is_valid(known, now_s, num_decoding, shape, _ESTIMATE_HOLDS_S):
            return known
        plain_s = self.costs.step_s(num_decoding, chain(0), now_s)
        step_s = self._step_s(now_s, num_decoding, shape)
        [goodput] = self.of(now_s, num_decoding, [shape])
        tokens_per_s = goodput * step_s / max(plain_s, step_s)
        self._estimate = GoodputEstimate(
            now_s,
            num_decoding,
            shape,
            tokens_per_s=tokens_per_s,
            speedup=tokens_per_s * plain_s / num_decoding,
            profile_error=self.costs.profile_error(num_decoding, shape, now_s),
        )
        return self._estimate
