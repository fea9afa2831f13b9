"""Speculation policy: decides the draft shape of each step, by load and by operator settings.

Drafts pay while the target is memory-bound, in small batches, and cost time once it is
compute-bound. A threshold on the decoding requests decides; below it goodput or a schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from specdec.config.speculation.methods import DraftModelConfig
from specdec.speculation.policy.cost_model import StepSeconds
from specdec.speculation.policy.expected_goodput import GoodputEstimate, StepTiming
from specdec.speculation.policy.goodput import GoodputChooser
from specdec.speculation.policy.hysteresis import LoadHysteresis
from specdec.speculation.policy.service_curve import CurveEstimator
from specdec.types.control import SpeculationControl
from specdec.types.drafts.draft_decision import (
    NO_PROMPTS,
    Decision,
    DecisionLog,
    DecisionReason,
    DraftAhead,
    DraftShape,
    PromptLoad,
    chain,
    chains,
    tree,
    trees,
)
from specdec.types.drafts.draft_length import LengthRule, LengthSchedule, draft_budget
from specdec.types.drafts.draft_survival import AcceptanceHistory
from specdec.types.reports.service_curve import ServiceCurve

DEFAULT_HYSTERESIS = 2
DEFAULT_DWELL_S = 1.0

_SETTLING_S = 1.0
_SETTLING_STEPS = 8
"""Time for a head or a draft model to catch up after drafts are turned on, whichever is longer;
until then a missing draft does not count as rejected, nor a step with one as a slow step."""

MAX_BATCHED_TOKENS = 2**20

_NO_CHOOSERS: Mapping[str | None, GoodputChooser] = MappingProxyType({})


class SpeculationPolicy:
    """Policy that decides in each step what to draft, with the reason.

    In mode auto, drafts are off while the load is above the threshold (`LoadHysteresis`). Below it
    a schedule or goodput decides, where there is one; otherwise the number is the control's.
    Changes by an operator apply from the next step.

    log: decisions by reason, and the timeline of changes. num_flips: times that `is_on` has
    changed, by load or by an operator.
    """

    def __init__(
        self,
        control: SpeculationControl,
        clock: Callable[[], float],
        *,
        hysteresis: int = DEFAULT_HYSTERESIS,
        dwell_s: float = DEFAULT_DWELL_S,
        schedule: LengthSchedule | None = None,
        choosers: Mapping[str | None, GoodputChooser] = _NO_CHOOSERS,
        length_rule: LengthRule | None = None,
        num_tree_tokens: int = 0,
        has_fixed_trees: bool = False,
        max_num_batched_tokens: int = MAX_BATCHED_TOKENS,
        max_num_seqs: int = 1,
        is_drafter_available: Callable[[], bool] = lambda: True,
        catches_up: bool = False,
        ahead_choices: tuple[DraftAhead, ...] = (DraftAhead.OFF,),
    ) -> None:
        """`clock` is monotonic, in seconds; `hysteresis` is a number of requests.

        choosers: of goodput, by the method that an operator may choose, or None; else empty.
        length_rule: how the draft length of a sequence follows its acceptance.
        num_tree_tokens: draft tokens of a tree, whose depth is the control's number; 0 for chains
            only. Fixed decisions are trees; goodput chooses, and a schedule has chains.
        has_fixed_trees: whether their shape is given, so that goodput has no smaller ones.
        max_num_batched_tokens: of a step; goodput chooses at most an even share of it.
        max_num_seqs: largest number of decoding requests, for `service_curve`.
        is_drafter_available: called in each step. catches_up: whether a model first runs a text.
        ahead_choices: what a draft model may draft while the target runs; goodput chooses, other
            policies take the last one.
        """
        self._control, self._clock, self.log = control, clock, DecisionLog(clock)
        self._load = LoadHysteresis(control.threshold, hysteresis, dwell_s)
        self._schedule, self._choosers = schedule, choosers
        self._length_rule, self._is_drafter_available = length_rule, is_drafter_available
        self._max_num_batched_tokens = max_num_batched_tokens
        self._curves = CurveEstimator(max_num_seqs, max_num_batched_tokens)
        self._num_tree_tokens, self._has_fixed_trees = num_tree_tokens, has_fixed_trees
        self._catches_up, self._ahead_choices = catches_up, ahead_choices
        self._begin_without_steps()

    def _begin_without_steps(self) -> None:
        """Set what the policy knows of steps and decisions before the first one."""
        self._pays = True  # whether the last choice of schedule or goodput had drafts
        self._decision = self._initial_decision()
        self._num_decoding = 0
        self._decided_at_s = -math.inf
        self._drafts_since_s: float | None = None  # None while there are none
        self._num_steps_drafting = 0  # since then
        self._is_for_decoding = False  # whether the present step was decided for decoding
        self._is_begun = False  # whether the present step has been reported
        self._is_timed = False  # whether it decodes only, with the drafts that were decided
        self._waited_s: float | None = None  # of the present step, for a draft not made ahead
        self._num_rows: float | None = None  # its draft tokens of a sequence, with slots left out
        # what records the drafts and the time of the present step, and its shape
        self._observer, self._shape = self._chooser, self._decision.shape
        self._was_on = self.is_on
        self.num_flips = 0

    @property
    def control(self) -> SpeculationControl:
        """The settings that apply."""
        return self._control

    @property
    def is_on(self) -> bool:
        """Return whether requests without options of their own get drafts, probes aside."""
        mode, count = self._control.mode, self._control.num_speculative_tokens
        is_on = mode == "on" or (mode == "auto" and self._load.is_within and self._pays)
        return count > 0 and is_on

    @property
    def decision(self) -> Decision:
        """The last decision."""
        return self._decision

    @property
    def estimate(self) -> GoodputEstimate | None:
        """Expected goodput of the last decision, at its batch; None where no costs are known."""
        if self._chooser is None or self._num_decoding == 0:
            return None
        shape = self._decision.shape
        return self._chooser.expected.estimate(self._decided_at_s, self._num_decoding, shape)

    @property
    def observed(self) -> StepSeconds:
        """Seconds of steps, measured and profiled, of all choosers."""
        return StepSeconds.sum(each.expected.costs.observed for each in self._choosers.values())

    @property
    def service_curve(self) -> ServiceCurve | None:
        """Expected rates by load under the settings in force; None where nothing was measured."""
        if self._chooser is None:
            return None
        of = self._chooser.expected, self._control
        return self._curves.at(self._clock(), *of, self._possible_shapes)

    def update(self, control: SpeculationControl) -> None:
        """Apply an operator's settings from the next step on; equal ones have no effect."""
        if control == self._control:
            return
        if (control.mode, control.threshold) != (self._control.mode, self._control.threshold):
            self._load.reset(control.threshold)
        self._control = control
        self._pays = True
        self._decision = self._initial_decision()
        self._note_flip()

    def decide(
        self,
        num_decoding: int,
        num_eligible: int | None = None,
        prompts: PromptLoad = NO_PROMPTS,
    ) -> Decision:
        """Decide what a sequence may draft in the next step; call this once a step.

        num_decoding: requests that decode in it. Those in prefill do not count, and a step without
        decoding does not affect the load. num_eligible: those that did not opt out; None for all.
        prompts: that the step may compute beside them.
        """
        self._is_begun = self._is_timed = False
        self._is_for_decoding = num_decoding > 0
        self._observer, self._shape = self._chooser, self._decision.shape
        if num_decoding == 0:
            return self._before_decoding(prompts)
        now_s = self._decided_at_s = self._clock()
        self._num_decoding = num_decoding
        decision = self._preferred(num_decoding, prompts, now_s)
        self._note_flip()
        if decision.num_draft_tokens and num_eligible == 0:
            decision = Decision(chain(0), DecisionReason.REQUEST)
        elif decision.num_draft_tokens and not self._is_drafter_available():
            decision = Decision(chain(0), DecisionReason.DRAFTER_UNAVAILABLE)
        self._note_drafting(decision, now_s)
        self._decision, self._shape = decision, decision.shape
        return decision

    def _before_decoding(self, prompts: PromptLoad) -> Decision:
        """Return the decision of a step with prompts alone, after which a head may draft."""
        last, chooser, control = self._decision, self._chooser, self._control
        is_chosen = control.mode == "auto" and control.num_speculative_tokens > 0
        if chooser is None or not is_chosen or not self._load.is_within:
            return last
        shapes = self._shapes(max(1, prompts.num_sequences))
        shape = chooser.shape_after(prompts, self._clock(), shapes)
        if shape is None:
            return last
        if shape.num_draft_tokens and not self._is_drafter_available():
            return Decision(chain(0), DecisionReason.DRAFTER_UNAVAILABLE)
        return Decision(shape, DecisionReason.GOODPUT, control.num_speculative_tokens)

    def _note_drafting(self, decision: Decision, now_s: float) -> None:
        """Note since when drafts are wanted, by time and by steps."""
        self._num_steps_drafting += 1
        if not decision.num_draft_tokens:
            self._drafts_since_s = None
        elif self._drafts_since_s is None:
            self._drafts_since_s, self._num_steps_drafting = now_s, 1

    def begin_step(
        self,
        num_asked: int,
        num_drafted: int,
        *,
        has_prefill: bool,
        waited_s: float | None = None,
        num_slots: int | None = None,
    ) -> None:
        """Record that the decided step begins; to be skipped for steps without decoding.

        A row of a prompt of one token looks as if it decoded, so steps count as they were decided.

        num_asked: rows that were to draft. num_drafted: rows that did. has_prefill: whether the
        step also computes a part of a prompt, so that its time is not that of decoding. waited_s:
        seconds for which it has waited for a draft model; None where it has not. num_slots: draft
            tokens that it was to have; None for those of the shape.
        """
        if not self._is_for_decoding:
            return
        self._waited_s = waited_s
        self._num_rows = None if num_slots is None else num_slots / self._num_decoding
        decision = self._decision
        is_missing = num_asked > 0 and num_drafted == 0 and decision.ahead is DraftAhead.OFF
        is_catching_up = self._catches_up and is_missing
        reason = DecisionReason.CATCHING_UP if is_catching_up else decision.reason
        self.log.record(decision.num_draft_tokens, reason, self._num_decoding)
        is_partial = decision.num_drafting is not None and num_asked < self._num_decoding
        lacks_drafts = self._is_settling and num_drafted < num_asked
        self._is_begun = True
        self._is_timed = not (has_prefill or is_partial or lacks_drafts)

    def observe_rows(
        self,
        num_rows: int,
        num_asked: int,
        num_drafted: int,
        num_accepted: int,
        *,
        is_tree: bool = False,
    ) -> None:
        """Record a result that the drafts of `num_rows` sequences had; of trees the depths."""
        chooser = self._observer
        if chooser is None or num_asked == 0 or (num_drafted == 0 and self._is_settling):
            return
        shape, now_s = self._shape, self._decided_at_s
        if shape.ahead is DraftAhead.OFF or is_tree:
            if not is_tree or self._is_begun:  # otherwise another decision has the tree's size
                size = shape.num_draft_tokens if is_tree else 0
                chooser.observe_drafts(num_asked, num_accepted, now_s, size, num_drafts=num_rows)
            return
        is_hit = num_drafted > 0 and self._waited_s is None
        for _ in range(num_rows):
            chooser.observe_ahead(shape, num_asked, num_drafted, num_accepted, now_s, is_hit=is_hit)

    def end_step(self, histories: Callable[[], Sequence[AcceptanceHistory]] = tuple) -> None:
        """Record that the step has been verified and committed.

        histories: returns those of its sequences that draft by the decision; called where the
        division of slots is due.
        """
        slots = self._observer.slots if self._observer is not None else None
        if slots is not None and slots.is_due(self._clock(), self._num_decoding):
            slots.observe(histories())
        is_begun, self._is_begun = self._is_begun, False
        if not is_begun or self._observer is None:
            return
        now_s = self._clock()
        seconds, shape = now_s - self._decided_at_s, self._shape
        is_ahead = shape.ahead is not DraftAhead.OFF  # waiting is then estimated by the hit rate
        drafted_s = self._waited_s or 0.0
        waited_s, drafted_s = (drafted_s, 0.0) if is_ahead else (0.0, drafted_s)
        timing = StepTiming(now_s, seconds - waited_s, waited_s, drafted_s, self._num_rows)
        self._observer.observe_step(self._num_decoding, shape, timing, is_typical=self._is_timed)

    def forget_step(self) -> None:
        """Discard a lost step, its time and its drafts."""
        self._is_begun = False

    @property
    def _chooser(self) -> GoodputChooser | None:
        return self._choosers.get(self._control.method)

    def _initial_decision(self) -> Decision:
        """Return the decision under new settings until a request decodes."""
        count = self._control.num_speculative_tokens if self.is_on else 0
        reason = DecisionReason.THRESHOLD if self._control.mode == "auto" else self._fixed_reason
        return Decision(self._fixed_shape(count), reason)

    def _fixed_shape(self, count: int) -> DraftShape:
        return tree(self._num_tree_tokens, depth=count).with_ahead(self._possible_ahead[-1])

    @property
    def _possible_ahead(self) -> tuple[DraftAhead, ...]:
        """What may be drafted ahead by the methods in force."""
        may_draft = self._control.method in (None, DraftModelConfig.name)
        return self._ahead_choices if may_draft else (DraftAhead.OFF,)

    @property
    def _fixed_reason(self) -> DecisionReason:
        return DecisionReason.RULE if self._control.is_by_rule else DecisionReason.OPERATOR

    @property
    def _is_settling(self) -> bool:
        """Return whether a draft model may not have caught up with all sequences yet."""
        since_s = self._drafts_since_s
        if not self._catches_up or since_s is None:
            return False
        is_early = self._num_steps_drafting <= _SETTLING_STEPS
        return is_early or self._decided_at_s - since_s < _SETTLING_S

    def _preferred(self, num_decoding: int, prompts: PromptLoad, now_s: float) -> Decision:
        """Return the decision by settings and load, regardless of what can draft."""
        control = self._control
        if control.mode == "auto":
            self._load.update(num_decoding, now_s)
        else:
            self._load.note(num_decoding)
        if control.mode != "auto" or control.num_speculative_tokens == 0:
            count = 0 if control.mode == "off" else control.num_speculative_tokens
            return self._without_goodput(count, self._fixed_reason)
        if not self._load.is_within:
            return self._without_goodput(0, DecisionReason.THRESHOLD)
        return self._by_policy(num_decoding, prompts, now_s)

    def _without_goodput(self, num_draft_tokens: int, reason: DecisionReason) -> Decision:
        if self._chooser is not None:
            self._chooser.pause(self._decided_at_s)
        return Decision(self._fixed_shape(num_draft_tokens), reason)

    def _by_policy(self, num_decoding: int, prompts: PromptLoad, now_s: float) -> Decision:
        most, chooser = self._control.num_speculative_tokens, self._chooser
        if self._schedule is not None:
            count = min(most, self._schedule.num_draft_tokens(num_decoding))
            self._pays = count > 0
            shape = chain(count).with_ahead(self._possible_ahead[-1])
            return Decision(shape, DecisionReason.TABLE_ROW, most)
        if chooser is None:
            return Decision(self._fixed_shape(most), DecisionReason.THRESHOLD)
        choice = chooser.choose(now_s, num_decoding, self._shapes(num_decoding), prompts)
        if choice.reason is DecisionReason.GOODPUT:
            self._pays = choice.shape.num_draft_tokens > 0
        return replace(choice, first_length=most)

    def _shapes(self, num_decoding: int) -> tuple[DraftShape, ...]:
        """Return the shapes for which the budget of a step suffices: chains by length, trees."""
        share = draft_budget(self._max_num_batched_tokens, num_decoding) // num_decoding
        count = self._control.num_speculative_tokens
        longest = count if self._length_rule is None else self._length_rule.longest(count)
        lengths = chains(max(0, min(longest, share)))
        grown = trees(self._num_tree_tokens, count, is_fixed=self._has_fixed_trees)
        ahead = (each.with_ahead(kind) for kind in self._possible_ahead[1:] for each in lengths[1:])
        return (*lengths, *(each for each in grown if each.num_draft_tokens <= share), *ahead)

    def _possible_shapes(self, num_decoding: int) -> tuple[DraftShape, ...]:
        """Return the shapes that the settings in force allow at a load."""
        control, count = self._control, self._control.num_speculative_tokens
        is_allowed = control.mode == "on" or num_decoding <= control.threshold
        if control.mode == "off" or not (is_allowed and count and self._is_drafter_available()):
            return chains(0)
        return (self._fixed_shape(count),) if control.mode == "on" else self._shapes(num_decoding)

    def _note_flip(self) -> None:
        self.num_flips += self.is_on != self._was_on
        self._was_on = self.is_on
