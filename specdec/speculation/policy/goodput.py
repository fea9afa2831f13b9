"""Chooses the number of draft tokens that promises most output a second.

Goodput is what a step is expected to yield over what it is expected to take (SmartSpec, Liu et al.
2024, arXiv 2406.14066, section 4; for the choice of a length by it also arXiv 2512.22420). Here
both are measured: the yield as acceptance by position, the time by batch size and draft length.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.speculation.policy.acceptance import AcceptanceWindow
from specdec.speculation.policy.cost_model import StepCosts
from specdec.types.draft_decision import DecisionReason
from specdec.types.errors import InvalidValueError

_FIRST_PROBE_AFTER_S = 5.0
_LAST_PROBE_AFTER_S = 60.0
_PROBE_S = 1.0
_PROBE_DRAFTS = 32
_PROBE_STEPS = 6

_ESTIMATE_HOLDS_S = 0.5


@dataclass(frozen=True)
class GoodputSettings:
    """How often and how willingly the choice changes.

    margin: share by which another number has to be better than the present one.
    dwell_s: how long a number holds at least. review_s: how long a comparison holds, which takes
        some ten microseconds; in between a decision is a look at the clock.
    """

    margin: float = 0.03
    dwell_s: float = 1.0
    review_s: float = 0.05

    def __post_init__(self) -> None:
        for name in ("margin", "dwell_s", "review_s"):
            if not getattr(self, name) >= 0:
                raise InvalidValueError(name, getattr(self, name), "0 or a number above it")


@dataclass(frozen=True)
class Choice:
    """A number of draft tokens, and whether it is goodput's or a probe's."""

    num_draft_tokens: int
    reason: DecisionReason


@dataclass(frozen=True)
class GoodputEstimate:
    """What steps of one kind are expected to yield, as it was reckoned at `at_s`.

    num_decoding, num_draft_tokens: the kind, by sequences and draft tokens of each. tokens_per_s:
        over the whole batch. speedup: that over the same without drafts.
    """

    at_s: float
    num_decoding: int
    num_draft_tokens: int
    tokens_per_s: float
    speedup: float

    def holds_for(self, now_s: float, num_decoding: int, num_draft_tokens: int) -> bool:
        """Whether it still tells of such steps."""
        is_of_the_kind = (self.num_decoding, self.num_draft_tokens) == (
            num_decoding,
            num_draft_tokens,
        )
        return is_of_the_kind and now_s - self.at_s < _ESTIMATE_HOLDS_S


@dataclass
class _Probe:
    """Looks at a number of draft tokens beside the chosen one, every now and then.

    So it is noticed that drafts would pay again, or that a longer one costs less than was thought.
    A look ends when enough steps and drafts are known, at the latest after a second: a draft model
    may first have to catch up. Each in vain doubles the wait for the next, from five seconds to a
    minute, so that what they cost is bounded.
    """

    due_at_s: float
    wait_s: float = _FIRST_PROBE_AFTER_S
    num_draft_tokens: int | None = None  # None while none runs
    ends_at_s: float = 0.0
    num_drafts_left: int = 0
    num_steps_left: int = 0
    looks_up: bool = True

    def begin(self, now_s: float, chosen: int, most: int) -> None:
        """Looks to one side, and next time to the other."""
        aside = chosen + 1 if self.looks_up or chosen == 0 else chosen - 1
        self.num_draft_tokens = aside if aside <= most else max(0, chosen - 1)
        self.looks_up = not self.looks_up
        self.ends_at_s = now_s + _PROBE_S
        self.num_drafts_left, self.num_steps_left = _PROBE_DRAFTS, _PROBE_STEPS

    def end(self, now_s: float) -> None:
        self.num_draft_tokens = None
        self.due_at_s = now_s + self.wait_s
        self.wait_s = min(2 * self.wait_s, _LAST_PROBE_AFTER_S)

    def break_off(self, now_s: float) -> None:
        self.num_draft_tokens = None
        self.due_at_s = now_s + self.wait_s

    def is_over(self, now_s: float) -> bool:
        is_known = self.num_steps_left <= 0 and (
            self.num_drafts_left <= 0 or self.num_draft_tokens == 0
        )
        return is_known or now_s >= self.ends_at_s


class GoodputChooser:
    """argmax over k of expected tokens / step seconds, 0 included, with some inertia.

    Pure but for what it was told: the same calls with the same times choose the same.
    """

    def __init__(self, costs: StepCosts, settings: GoodputSettings | None = None) -> None:
        self._costs = costs
        self._settings = settings or GoodputSettings()
        self._window = AcceptanceWindow()
        self._estimate: GoodputEstimate | None = None
        self._chosen: int | None = None
        self._changed_at_s = 0.0
        self._reviewed_at_s = 0.0
        self._probe = _Probe(0.0)

    def choose(self, now_s: float, num_decoding: int, most: int) -> Choice:
        """The number for the coming step, from 0 to `most`. num_decoding: 1 or more."""
        if self._chosen is None or self._chosen > most:
            self._change(now_s, self._best(now_s, num_decoding, most))
        elif self._probe.num_draft_tokens is not None:
            self._review_probe(now_s, num_decoding, most)
        elif now_s - self._reviewed_at_s >= self._settings.review_s:
            self._review(now_s, num_decoding, most)
        probed = self._probe.num_draft_tokens
        if probed is not None and probed <= most:
            return Choice(probed, DecisionReason.PROBE)
        assert self._chosen is not None
        return Choice(self._chosen, DecisionReason.GOODPUT)

    def pause(self, now_s: float) -> None:
        """To be called when somebody else decides: a probe that runs ends, and nothing is due."""
        self._reviewed_at_s = now_s
        if self._probe.num_draft_tokens is not None:
            self._probe.break_off(now_s)

    def observe_drafts(self, num_asked: int, num_accepted: int, now_s: float) -> None:
        """Takes in one sequence's step, in which it was to draft `num_asked` tokens."""
        self._window.record(num_asked, num_accepted, now_s)
        self._probe.num_drafts_left -= 1

    def observe_step(
        self, num_decoding: int, num_draft_tokens: int, seconds: float, now_s: float
    ) -> None:
        """Takes in what a step took that had no prefill in it."""
        self._costs.observe(num_decoding, num_draft_tokens, seconds, now_s)
        self._probe.num_steps_left -= 1

    def goodputs(self, now_s: float, num_decoding: int, most: int) -> list[float]:
        """Tokens a second over the batch, expected with 0, 1, ... `most` draft tokens."""
        expected = self._window.expected_tokens(most, now_s)
        return [
            num_decoding * tokens / self._costs.step_s(num_decoding, count, now_s)
            for count, tokens in enumerate(expected)
        ]

    def estimate(self, now_s: float, num_decoding: int, num_draft_tokens: int) -> GoodputEstimate:
        """Of steps with so many draft tokens; reckoned twice a second, and when the kind changes.

        No step with drafts is taken to be shorter than one without, whatever noise has it look so.
        """
        known = self._estimate
        if known is None or not known.holds_for(now_s, num_decoding, num_draft_tokens):
            known = self._estimate = self._reckon(now_s, num_decoding, num_draft_tokens)
        return known

    def _reckon(self, now_s: float, num_decoding: int, num_draft_tokens: int) -> GoodputEstimate:
        plain_s = self._costs.step_s(num_decoding, 0, now_s)
        step_s = max(plain_s, self._costs.step_s(num_decoding, num_draft_tokens, now_s))
        tokens = self._window.expected_tokens(num_draft_tokens, now_s)[-1]
        return GoodputEstimate(
            now_s,
            num_decoding,
            num_draft_tokens,
            tokens_per_s=num_decoding * tokens / step_s,
            speedup=tokens * plain_s / step_s,
        )

    def _best(self, now_s: float, num_decoding: int, most: int) -> int:
        """The best number; the present one unless another is better by more than the margin."""
        goodputs = self.goodputs(now_s, num_decoding, most)
        best = max(range(most + 1), key=lambda count: (goodputs[count], -count))
        present = self._chosen
        if present is None or present > most:
            return best
        is_worth_it = goodputs[best] > goodputs[present] * (1 + self._settings.margin)
        return best if is_worth_it else present

    def _review(self, now_s: float, num_decoding: int, most: int) -> None:
        self._reviewed_at_s = now_s
        if now_s - self._changed_at_s < self._settings.dwell_s:
            return
        best = self._best(now_s, num_decoding, most)
        if best != self._chosen:
            self._change(now_s, best)
        elif now_s >= self._probe.due_at_s and most > 0:
            self._probe.begin(now_s, best, most)

    def _review_probe(self, now_s: float, num_decoding: int, most: int) -> None:
        if not self._probe.is_over(now_s):
            return
        self._probe.end(now_s)
        best = self._best(now_s, num_decoding, most)
        if best != self._chosen:
            self._change(now_s, best)

    def _change(self, now_s: float, chosen: int) -> None:
        """Whatever is new is looked at from both sides before long."""
        self._chosen, self._changed_at_s, self._reviewed_at_s = chosen, now_s, now_s
        self._probe = _Probe(now_s + _FIRST_PROBE_AFTER_S)
