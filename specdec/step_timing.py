"""Takes the time of drafting and of verification; the engine has no clock."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many

from specdec.proposers import DraftRequest, Proposal, Proposer
from specdec.step import StepInput, VerifyOutput
from specdec.workers import Target

Observe = Callable[[float], None]


class TimedTarget:
    """A target whose steps are observed, in seconds from `begin` to the end of `collect`.

    A step that was begun while another ran is observed from the end of that one. One that is lost
    is not.
    """

    def __init__(
        self, target: Target, observe: Observe, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._target = target
        self._observe = observe
        self._clock = clock
        self._began_at_s: deque[float] = deque()
        self._ended_at_s = -math.inf

    def begin(self, step: StepInput) -> None:
        """Hands over a step."""
        self._began_at_s.append(self._clock())
        self._target.begin(step)

    def collect(self) -> VerifyOutput:
        """Waits for the first step that was begun and not collected."""
        began_at_s = max(self._began_at_s.popleft(), self._ended_at_s)
        output = self._target.collect()
        self._ended_at_s = self._clock()
        self._observe(self._ended_at_s - began_at_s)
        return output


class TimedProposer:
    """A proposer whose drafting is observed, in seconds that a step waits for it.

    A step in which it only hears of sequences, and is asked for no tokens, is not.
    """

    def __init__(
        self, proposer: Proposer, observe: Observe, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._proposer = proposer
        self._observe = observe
        self._clock = clock
        self._is_asked = False
        self._began_at_s = 0.0

    def begin(self, requests: Many[DraftRequest]) -> None:
        """Starts drafting."""
        self._is_asked = any(request.max_tokens for request in requests)
        self._began_at_s = self._clock()
        self._proposer.begin(requests)

    def collect(self) -> list[Proposal]:
        """The drafts of the last `begin`."""
        proposals = self._proposer.collect()
        if self._is_asked:
            self._observe(self._clock() - self._began_at_s)
        return proposals

    def release(self, seq_id: int) -> None:
        """Forgets a sequence."""
        self._proposer.release(seq_id)
