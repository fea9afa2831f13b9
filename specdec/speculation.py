"""How many tokens to draft, by the load of the moment and by what an operator has said.

Drafts pay while the target waits for memory, that is in small batches, and cost once it waits for
arithmetic. So the policy compares the number of decoding requests with a threshold, every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from specdec.errors import InvalidValueError
from specdec.sampling_params import MAX_NUM_SPECULATIVE_TOKENS

SpeculationMode = Literal["auto", "on", "off"]
SPECULATION_MODES: tuple[SpeculationMode, ...] = ("auto", "on", "off")

DEFAULT_SPECULATION_THRESHOLD = 32
MAX_SPECULATION_THRESHOLD = 4096
"""As many requests as an engine may be told to run at once."""

DEFAULT_HYSTERESIS = 2
DEFAULT_DWELL_S = 1.0


@dataclass(frozen=True)
class SpeculationControl:
    """What is wanted of speculation. It changes how fast a service answers, never what.

    mode: on and off hold at every load; auto goes by the threshold.
    threshold: largest number of decoding requests that mode auto drafts for.
    num_speculative_tokens: draft tokens a step for requests that do not choose; 0 drafts for none.
    """

    mode: SpeculationMode
    threshold: int
    num_speculative_tokens: int

    def __post_init__(self) -> None:
        if self.mode not in SPECULATION_MODES:
            raise InvalidValueError("mode", self.mode, f"one of {', '.join(SPECULATION_MODES)}")
        _require_count("threshold", self.threshold, MAX_SPECULATION_THRESHOLD)
        _require_count(
            "num_speculative_tokens", self.num_speculative_tokens, MAX_NUM_SPECULATIVE_TOKENS
        )


class SpeculationPolicy:
    """Turns speculation off above a load, and on again well below it.

    In mode auto it goes off when more than `threshold` requests decode, and comes back when at most
    `threshold - hysteresis` have for `dwell_s` seconds; a threshold so low that this is none comes
    back at one. So requests that end together, and are followed by as many, are no quiet time. It
    stays on for at least `dwell_s` too. What an operator changes holds from the next step.
    """

    def __init__(
        self,
        control: SpeculationControl,
        clock: Callable[[], float],
        *,
        hysteresis: int = DEFAULT_HYSTERESIS,
        dwell_s: float = DEFAULT_DWELL_S,
    ) -> None:
        """`clock` tells seconds and never goes back; `hysteresis` is a number of requests."""
        _require_count("hysteresis", hysteresis, MAX_SPECULATION_THRESHOLD)
        if not 0 <= dwell_s < math.inf:
            raise InvalidValueError("dwell_s", dwell_s, "a number of seconds, 0 or more")
        self._control = control
        self._clock = clock
        self._hysteresis = hysteresis
        self._dwell_s = dwell_s
        self._num_decoding = 0  # in the last step that had any
        self._is_within = True  # the load, as mode auto judges it
        self._is_judged = False  # whether a step was judged by the present control
        self._turned_at_s = -math.inf
        self._quiet_since_s = math.inf  # how long the load has been low enough to come back
        self._num_flips = 0

    @property
    def control(self) -> SpeculationControl:
        """What is in force."""
        return self._control

    @property
    def is_on(self) -> bool:
        """Whether a request that says nothing about it gets drafts."""
        mode, count = self._control.mode, self._control.num_speculative_tokens
        return count > 0 and (mode == "on" or (mode == "auto" and self._is_within))

    @property
    def num_flips(self) -> int:
        """Times that `is_on` has changed, by load or by an operator."""
        return self._num_flips

    def update(self, control: SpeculationControl) -> None:
        """Takes over what an operator wants. The same again changes nothing."""
        if control == self._control:
            return
        was_on = self.is_on
        if (control.mode, control.threshold) != (self._control.mode, self._control.threshold):
            self._is_within = self._num_decoding <= control.threshold
            self._is_judged = False
        self._control = control
        self._num_flips += self.is_on != was_on

    def num_draft_tokens(self, num_decoding: int) -> int:
        """What a sequence may draft in the coming step; to be called once a step.

        num_decoding: requests that decode in it. Those in prefill do not count, and a step that
        decodes nothing says nothing about the load.
        """
        if num_decoding > 0:
            self._num_decoding = num_decoding
            if self._control.mode == "auto":
                self._judge(num_decoding)
        return self._control.num_speculative_tokens if self.is_on else 0

    def _judge(self, num_decoding: int) -> None:
        now_s, is_within = self._clock(), num_decoding <= self._limit()
        self._quiet_since_s = min(self._quiet_since_s, now_s) if is_within else math.inf
        if is_within == self._is_within:
            self._is_judged = True
            return
        since_s = self._quiet_since_s if is_within else self._turned_at_s
        if self._is_judged and now_s - since_s < self._dwell_s:
            return
        was_on = self.is_on
        self._is_within, self._is_judged, self._turned_at_s = is_within, True, now_s
        self._num_flips += self.is_on != was_on

    def _limit(self) -> int:
        """Most decoding requests with which speculation is on after the coming step."""
        threshold = self._control.threshold
        if self._is_within or not self._is_judged:
            return threshold
        return max(threshold - self._hysteresis, min(threshold, 1))


def _require_count(name: str, value: int, high: int) -> None:
    if type(value) is not int or not 0 <= value <= high:  # to isinstance, True is an int
        raise InvalidValueError(name, value, f"a whole number from 0 to {high}")
