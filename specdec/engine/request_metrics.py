"""Times one request from its arrival to its end."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdec.engine.metrics import (
    ABORTED,
    DECODE_TIME,
    END_TO_END,
    FIRST_TOKEN,
    GENERATION_TOKENS,
    INTER_TOKEN,
    PREFILL_TIME,
    PROMPT_TOKENS,
    QUEUE_TIME,
    Metrics,
)
from specdec.engine.outputs import RequestOutput
from specdec.sequences.sequence import EngineRequest
from specdec.speculation.proposers import DraftRequest, Proposal, Proposer
from specdec.types.messages import StepInput, VerifyOutput
from specdec.types.worker import Target

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

    def begin(self, requests: Sequence[DraftRequest]) -> None:
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


logger = logging.getLogger(__name__)


class AbortedError(Exception):
    """A request was ended by whoever may end it, other than by leaving its stream."""


LEFT = asyncio.CancelledError | GeneratorExit | AbortedError
"""What ends a request that is not wanted any more."""


@dataclass(frozen=True)
class RequestTimes:
    """When a request came to each stage, in seconds of one clock; None for those to come.

    queued_at: handed to the engine. began_at: in a batch. last_at: its latest output.
    """

    arrived_at: float
    queued_at: float | None
    began_at: float | None
    first_at: float | None
    last_at: float | None


class RequestObserver:
    """Told of each output when the engine delivers it, however slowly a client reads.

    Inter-token latency is recorded as vLLM does it: one observation a step, whether it brought one
    token or, with speculation, several. It is the time since the output before of the same choice,
    divided evenly among the steps whose tokens came together (`stream_interval`); the time per
    token is its sum by the tokens generated.
    The time to the first token is that of the choice that comes first. It is the time in the queue,
    from arrival to the first step, and the time of prefill, from there on. What follows is decode.
    """

    def __init__(
        self,
        request_id: str,
        metrics: Metrics,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Made when the request arrives. `clock` must be the one of `on_output`'s times."""
        self._request_id = request_id
        self._metrics = metrics
        self._clock = clock
        self._arrived_at = clock()
        self._queued_at: float | None = None
        self._began_at: float | None = None
        self._first_at: float | None = None
        self._last_at: dict[int, float] = {}  # by choice
        self._last: RequestOutput | None = None
        self._has_ended = False

    @property
    def times(self) -> RequestTimes:
        """The moments so far."""
        last_at = max(self._last_at.values(), default=None)
        return RequestTimes(
            self._arrived_at, self._queued_at, self._began_at, self._first_at, last_at
        )

    def on_queued(self, request: EngineRequest) -> None:
        """Takes note that the request goes to the engine."""
        self._queued_at = self._clock()

    def on_begun(self, at: float) -> None:
        """Records that the request has left the queue, for the first time."""
        self._began_at = at
        self._metrics[QUEUE_TIME].observe(at - self._arrived_at)

    def on_output(self, output: RequestOutput, at: float) -> None:
        """Records an output that was delivered at this time."""
        if self._first_at is None:
            self._on_first(at)
        elif output.choice in self._last_at:
            step_s = (at - self._last_at[output.choice]) / output.num_steps
            for _ in range(output.num_steps):
                self._metrics[INTER_TOKEN].observe(step_s)
        self._last_at[output.choice], self._last = at, output
        if output.is_last and output.finish_reason is not None:
            self._on_end(output, output.finish_reason.value, at)

    def on_broken_off(self, error: BaseException | None) -> None:
        """Records a request that ended before its last output; errors are counted where told.

        Nothing, where that output was delivered and only its reader has left before reading it.
        """
        if self._has_ended:
            return
        self._has_ended = True
        if isinstance(error, LEFT):
            self._metrics.count_end(ABORTED)
        self._log_end(reason_of(error), self._clock())

    def on_refused(self, error: BaseException) -> None:
        """Takes note of a request that never came to the engine; errors are counted where told.

        One whose client left while it was prepared was aborted, as later.
        """
        if isinstance(error, LEFT):
            self.on_broken_off(error)

    def _on_first(self, at: float) -> None:
        self._first_at = at
        self._metrics[FIRST_TOKEN].observe(at - self._arrived_at)
        if self._began_at is not None:
            self._metrics[PREFILL_TIME].observe(at - self._began_at)

    def _on_end(self, output: RequestOutput, reason: str, at: float) -> None:
        assert self._first_at is not None, "an end without a token"
        self._has_ended = True
        self._metrics[END_TO_END].observe(at - self._arrived_at)
        self._metrics[DECODE_TIME].observe(at - self._first_at)
        self._metrics[PROMPT_TOKENS].observe(output.num_prompt_tokens)
        self._metrics[GENERATION_TOKENS].observe(output.num_output_tokens)
        self._metrics.count_end(reason)
        self._log_end(reason, at)

    def _log_end(self, reason: str, at: float) -> None:
        """One line, with numbers only: neither the prompt nor the answer is anybody's business."""
        fields: dict[str, object] = {"request_id": self._request_id, "finish_reason": reason}
        if self._last is not None and self._first_at is not None:
            speculation = self._last.speculation
            fields |= {
                "prompt_tokens": self._last.num_prompt_tokens,
                "output_tokens": self._last.num_output_tokens,
                "time_to_first_token_s": round(self._first_at - self._arrived_at, 4),
                "num_drafts": speculation.num_drafts,
                "num_draft_tokens": speculation.num_draft_tokens,
                "num_accepted_tokens": speculation.num_accepted_tokens,
            }
        logger.info(
            "request ended", extra={**fields, "duration_s": round(at - self._arrived_at, 4)}
        )


def reason_of(error: BaseException | None) -> str:
    """What a request that was broken off is said to have ended by."""
    return ABORTED if isinstance(error, LEFT) else type(error).__name__
