"""How many tokens to draft, by the load of the moment and by what an operator has said.

Drafts pay while the target waits for memory, that is in small batches, and cost once it waits for
arithmetic. So every step is decided anew: by a threshold on the number of decoding requests, and
below it by a policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from specdec.config.length_schedule import BatchSizeTable
from specdec.speculation.policy.goodput import GoodputChooser, GoodputEstimate
from specdec.speculation.policy.hysteresis import LoadThreshold
from specdec.types.adaptive_length import draft_budget
from specdec.types.control import (
    MAX_SPECULATION_THRESHOLD,
    SPECULATION_MODES,
    SpeculationControl,
    SpeculationMode,
    require_count,
)
from specdec.types.draft_decision import Decision, DecisionLog, DecisionReason
from specdec.types.errors import InvalidValueError

DEFAULT_HYSTERESIS = 2
DEFAULT_DWELL_S = 1.0

_SETTLING_S = 1.0
"""After drafts come on, a draft model is given so long to catch up before its silence counts."""

_CAPACITY_PERIOD_S = 1.0

MAX_BATCHED_TOKENS = 2**20

_NO_CHOOSERS: Mapping[str | None, GoodputChooser] = MappingProxyType({})


@dataclass(frozen=True)
class StepDrafts:
    """What a step that begins has of drafts.

    num_asked: rows that were to draft. num_drafted: rows that did. has_prefill: whether it also
    computes a part of a prompt, so that its time says nothing of decoding.
    """

    num_asked: int
    num_drafted: int
    has_prefill: bool


class SpeculationPolicy:
    """Decides each step how much to draft, and says why.

    In mode auto, drafts go off while the load is above the threshold (`LoadThreshold`). Below it
    decides, where there is one, a table or goodput; without either the number is the control's.
    What an operator changes holds from the next step.
    """

    def __init__(
        self,
        control: SpeculationControl,
        clock: Callable[[], float],
        *,
        hysteresis: int = DEFAULT_HYSTERESIS,
        dwell_s: float = DEFAULT_DWELL_S,
        table: BatchSizeTable | None = None,
        choosers: Mapping[str | None, GoodputChooser] = _NO_CHOOSERS,
        max_adaptive_tokens: int = 0,
        max_num_batched_tokens: int = MAX_BATCHED_TOKENS,
        full_batch: int = 1,
        is_drafter_available: Callable[[], bool] = lambda: True,
        catches_up: bool = False,
    ) -> None:
        """`clock` tells seconds and never goes back; `hysteresis` is a number of requests.

        choosers: of goodput, for each method that an operator may choose, None included; or none.
        max_adaptive_tokens: longest draft of a sequence whose length follows its acceptance.
        max_num_batched_tokens: of a step; goodput promises nobody more than an even share of it.
        full_batch: as many decoding requests as are meant to be, for `capacity_tokens_per_s`.
        is_drafter_available: asked each step. catches_up: whether a draft model has to read a text
            before it can continue it.
        """
        require_count("hysteresis", hysteresis, MAX_SPECULATION_THRESHOLD)
        if not 0 <= dwell_s < math.inf:
            raise InvalidValueError("dwell_s", dwell_s, "a number of seconds, 0 or more")
        self._control = control
        self._clock = clock
        self._load = LoadThreshold(control.threshold, hysteresis, dwell_s)
        self._table = table
        self._choosers = choosers
        self._max_adaptive_tokens = max_adaptive_tokens
        self._max_num_batched_tokens = max_num_batched_tokens
        self._full_batch = full_batch
        self._capacity_tokens_per_s: float | None = None
        self._capacity_at_s = -math.inf
        self._is_drafter_available = is_drafter_available
        self._catches_up = catches_up
        self._log = DecisionLog(clock)
        self._promises = True  # whether table or goodput were for drafts when they were last asked
        self._decision = self._unjudged()
        self._num_decoding = 0
        self._decided_at_s = -math.inf
        self._drafts_since_s: float | None = None  # None while there are none
        self._step: StepDrafts | None = None
        self._judged = self._chooser  # whose choice the step's drafts and time tell about
        self._was_on = self.is_on
        self._num_flips = 0

    @property
    def control(self) -> SpeculationControl:
        """What is in force."""
        return self._control

    @property
    def is_on(self) -> bool:
        """Whether a request that says nothing about it gets drafts; a probe does not count."""
        mode, count = self._control.mode, self._control.num_speculative_tokens
        is_for_it = mode == "on" or (mode == "auto" and self._load.is_within and self._promises)
        return count > 0 and is_for_it

    @property
    def num_flips(self) -> int:
        """Times that `is_on` has changed, by load or by an operator."""
        return self._num_flips

    @property
    def decision(self) -> Decision:
        """The last one."""
        return self._decision

    @property
    def estimate(self) -> GoodputEstimate | None:
        """Of the last decision, at its batch; None where no costs are known."""
        if self._chooser is None or self._num_decoding == 0:
            return None
        count = self._decision.num_draft_tokens
        return self._chooser.estimate(self._decided_at_s, self._num_decoding, count)

    @property
    def log(self) -> DecisionLog:
        """Decisions by reason, and when they changed."""
        return self._log

    @property
    def capacity_tokens_per_s(self) -> float | None:
        """The most that a full batch is expected to yield; None where nothing was measured."""
        return self._capacity_tokens_per_s

    def update(self, control: SpeculationControl) -> None:
        """Takes over what an operator wants. The same again changes nothing."""
        if control == self._control:
            return
        if (control.mode, control.threshold) != (self._control.mode, self._control.threshold):
            self._load.reset(control.threshold)
        self._control = control
        self._promises = True
        self._decision = self._unjudged()
        self._note_flip()

    def decide(self, num_decoding: int, num_willing: int | None = None) -> Decision:
        """What a sequence may draft in the coming step; to be called once a step.

        num_decoding: requests that decode in it. Those in prefill do not count, and a step that
        decodes nothing says nothing about the load. num_willing: those that have not opted out;
        None for all.
        """
        self._step, self._judged = None, self._chooser
        if num_decoding == 0:
            return self._decision
        now_s = self._decided_at_s = self._clock()
        self._num_decoding = num_decoding
        decision = self._wanted(num_decoding, now_s)
        self._note_flip()
        if now_s - self._capacity_at_s >= _CAPACITY_PERIOD_S:
            self._estimate_capacity(now_s)
        if decision.num_draft_tokens:
            if num_willing == 0:
                decision = Decision(0, DecisionReason.REQUEST)
            elif not self._is_drafter_available():
                decision = Decision(0, DecisionReason.DRAFTER_AWAY)
        if not decision.num_draft_tokens:
            self._drafts_since_s = None
        elif self._drafts_since_s is None:
            self._drafts_since_s = now_s
        self._decision = decision
        return decision

    def begin_step(self, drafts: StepDrafts) -> None:
        """The step that was decided on begins; one that decodes nothing is not to be told."""
        decision = self._decision
        is_behind = self._catches_up and drafts.num_asked > 0 and drafts.num_drafted == 0
        reason = DecisionReason.CATCHING_UP if is_behind else decision.reason
        self._log.record(decision.num_draft_tokens, reason, self._num_decoding)
        self._step = drafts

    def observe_row(self, num_asked: int, num_drafted: int, num_accepted: int) -> None:
        """Takes in what came of one sequence's draft of the step."""
        chooser = self._judged
        if chooser is None or num_asked == 0 or (num_drafted == 0 and self._is_settling):
            return
        chooser.observe_drafts(num_asked, num_accepted, self._decided_at_s)

    def end_step(self) -> None:
        """The step has been verified and committed."""
        step, self._step = self._step, None
        if step is None or step.has_prefill or self._judged is None:
            return
        now_s = self._clock()
        seconds, count = now_s - self._decided_at_s, self._decision.num_draft_tokens
        self._judged.observe_step(self._num_decoding, count, seconds, now_s)

    def forget_step(self) -> None:
        """The step is lost; neither its time nor its drafts say anything."""
        self._step = None

    @property
    def _chooser(self) -> GoodputChooser | None:
        return self._choosers.get(self._control.method)

    def _unjudged(self) -> Decision:
        """What holds under a new control until something decodes."""
        count = self._control.num_speculative_tokens if self.is_on else 0
        reason = DecisionReason.THRESHOLD if self._control.mode == "auto" else self._fixed_reason
        return Decision(count, reason)

    @property
    def _fixed_reason(self) -> DecisionReason:
        return DecisionReason.RULE if self._control.is_by_rule else DecisionReason.OPERATOR

    @property
    def _is_settling(self) -> bool:
        """Whether a draft model may not have caught up with anyone yet."""
        since_s = self._drafts_since_s
        return (
            self._catches_up and since_s is not None and self._decided_at_s - since_s < _SETTLING_S
        )

    def _wanted(self, num_decoding: int, now_s: float) -> Decision:
        """By control and load alone, whoever drafts."""
        control = self._control
        if control.mode == "auto":
            self._load.judge(num_decoding, now_s)
        else:
            self._load.note(num_decoding)
        if control.mode != "auto" or control.num_speculative_tokens == 0:
            count = 0 if control.mode == "off" else control.num_speculative_tokens
            return self._paused(count, self._fixed_reason)
        if not self._load.is_within:
            return self._paused(0, DecisionReason.THRESHOLD)
        return self._by_policy(num_decoding, now_s)

    def _paused(self, num_draft_tokens: int, reason: DecisionReason) -> Decision:
        """A decision in which goodput has no say."""
        if self._chooser is not None:
            self._chooser.pause(self._decided_at_s)
        return Decision(num_draft_tokens, reason)

    def _by_policy(self, num_decoding: int, now_s: float) -> Decision:
        most, chooser = self._control.num_speculative_tokens, self._chooser
        if self._table is not None:
            count = min(most, self._table.num_draft_tokens(num_decoding))
            self._promises = count > 0
            return Decision(count, DecisionReason.TABLE_ROW, most)
        if chooser is None:
            return Decision(most, DecisionReason.THRESHOLD)
        choice = chooser.choose(now_s, num_decoding, self._room(num_decoding))
        if choice.reason is DecisionReason.GOODPUT:
            self._promises = choice.num_draft_tokens > 0
        return Decision(choice.num_draft_tokens, choice.reason, most)

    def _room(self, num_decoding: int) -> int:
        """Most draft tokens of each of so many sequences."""
        budget = draft_budget(self._max_num_batched_tokens, num_decoding)
        most = max(self._control.num_speculative_tokens, self._max_adaptive_tokens)
        return max(0, min(most, budget // num_decoding))

    def _estimate_capacity(self, now_s: float) -> None:
        self._capacity_at_s = now_s
        if self._chooser is not None:
            goodputs = self._chooser.goodputs(now_s, self._full_batch, self._room(self._full_batch))
            self._capacity_tokens_per_s = max(goodputs)

    def _note_flip(self) -> None:
        self._num_flips += self.is_on != self._was_on
        self._was_on = self.is_on
