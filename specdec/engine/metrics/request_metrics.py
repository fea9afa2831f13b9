"""Measures one request from its arrival to its end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable

from specdec.engine.metrics.metrics import (
    ABORTED,
    DECODE_TIME,
    END_TO_END,
    FIRST_TOKEN,
    GENERATION_TOKENS,
    INFERENCE_TIME,
    INTER_TOKEN,
    MAX_GENERATION_TOKENS,
    PARAMS_MAX_TOKENS,
    PARAMS_N,
    PER_OUTPUT_TOKEN,
    PREFILL_TIME,
    PROMPT_TOKENS,
    QUEUE_TIME,
    REQUEST_DURATION,
    TEXT_COMPLETION,
    TIME_PER_OUTPUT_TOKEN,
    TO_FIRST_TOKEN,
    Metrics,
)
from specdec.types.errors import AbortedError, DeadlineExceededError, OverloadedError
from specdec.types.reports.stats import FAILED
from specdec.types.responses import EngineOutput
from specdec.types.sampling.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


LEFT = asyncio.CancelledError | GeneratorExit | AbortedError
"""Errors that count as an abort by the client."""

_DEMAND = LEFT | OverloadedError | DeadlineExceededError
"""Errors of requests that are demand though they are refused, unlike invalid ones."""


class RequestMetrics:
    """Measurements of one request, taken when the engine delivers outputs, not when they are read.

    Inter-token latency follows vLLM: one observation per step, whether it produced one token or,
    with speculation, several. It is the time since the previous output of the same choice, divided
    evenly among the steps whose tokens were sent together (`stream_interval`).

    Time to first token ends with the first output of any choice. It consists of queue time, from
    arrival to the first step, and prefill time. Decode time follows.

    arrived_at, queued_at (sent to the engine), scheduled_at (in a batch), first_at: in seconds by
    `clock`; None for later stages.
    """

    def __init__(
        self,
        request_id: str,
        metrics: Metrics,
        clock: Callable[[], float] = time.perf_counter,
        operation: str = TEXT_COMPLETION,
        arrived_at: float | None = None,
    ) -> None:
        """Start at the request's arrival. clock: also the clock of `on_output`'s times.

        operation: CHAT or TEXT_COMPLETION. arrived_at: by `clock`; None means the present time.
        """
        self._request_id = request_id
        self._metrics = metrics
        self._clock = clock
        self._operation = operation
        self.arrived_at = clock() if arrived_at is None else arrived_at
        self.queued_at: float | None = None
        self.scheduled_at: float | None = None
        self.first_at: float | None = None
        self._last_at: dict[int, float] = {}  # by choice
        self._last: EngineOutput | None = None
        self._num_tokens_since = 0  # of plain decodes
        self._num_resumed = 0  # tokens of the answer that it began with
        self._has_ended = False
        self._num_choices = 1
        self._ended = set[int]()  # choices
        self._params: SamplingParams | None = None
        self._num_tokens: Counter[int] | None = None  # by choice, where there are several

    @property
    def last_at(self) -> float | None:
        """Time of the latest output."""
        return max(self._last_at.values(), default=None)

    def on_queued(self, params: SamplingParams, seed: int) -> None:
        """Record that the request is sent to the engine. seed: for a trace."""
        del seed
        self.queued_at = self._clock()
        self._params, self._num_choices = params, params.n
        self._num_tokens = Counter() if params.n > 1 else None

    def on_resumed(self, num_tokens: int) -> None:
        """Record that the first tokens of the answer were given; those of measurements follow."""
        self._num_resumed = num_tokens

    def on_scheduled(self, at: float) -> None:
        """Record that the request has left the queue for the first time."""
        self.scheduled_at = at
        self._metrics[QUEUE_TIME].observe(at - self.arrived_at)

    def on_output(self, output: EngineOutput, at: float) -> None:
        """Record an output and the time of its delivery."""
        if self.first_at is None:
            self._on_first(at)
        elif output.choice in self._last_at:
            step_s = (at - self._last_at[output.choice]) / output.num_steps
            self._metrics[INTER_TOKEN].observe(step_s, output.num_steps)
        self._last_at[output.choice], self._last, self._num_tokens_since = at, output, 0
        if self._num_tokens is not None:
            self._num_tokens[output.choice] += len(output.token_ids)
        if output.finish_reason is not None:
            self._count_end(output)
        if output.is_last and output.finish_reason is not None:
            counts = self._num_tokens
            num_tokens = output.num_output_tokens - self._num_resumed
            longest = num_tokens if counts is None else max(counts.values())
            self._on_end(output, longest, at)

    def on_choice_end(self, output: EngineOutput, longest: int) -> None:
        """Record the last output of a choice for its reader, who may end it before the engine.

        longest: tokens of the longest choice so far.
        """
        if self._has_ended:
            return
        self._count_end(output)
        if output.is_last:
            self._last, self._num_tokens_since = output, 0
            self._on_end(output, longest, self._clock())

    def on_token(self, at: float) -> None:
        """Record a further output of the only choice that is one token, as `on_output` does."""
        self._metrics[INTER_TOKEN].observe(at - self._last_at[0])
        self._last_at[0] = at
        self._num_tokens_since += 1

    @property
    def latest(self) -> EngineOutput | None:
        """The latest output, with the number of generated tokens.

        Of plain decodes after a whole output, only their number is known.
        """
        num_more = self._num_tokens_since - self._num_resumed
        if self._last is None or not num_more:
            return self._last
        return self._last._replace(num_output_tokens=self._last.num_output_tokens + num_more)

    def on_broken_off(self, error: BaseException | None) -> None:
        """Record a request of the engine that ended before its last output was delivered.

        Calls are counted by their errors where these are returned to the client.
        """
        if self._has_ended:
            return
        self._has_ended = True
        reason = ABORTED if isinstance(error, LEFT) else FAILED
        self._metrics.count_end(reason, self._num_choices - len(self._ended))
        self._observe_error(error)
        self._log_end(reason_of(error), self._clock())

    def on_refused(self, error: BaseException, num_choices: int) -> None:
        """Record a request that the engine has not accepted; it is received if it is demand."""
        if self._has_ended:
            return
        if isinstance(error, _DEMAND):
            self._metrics.num_refused += num_choices
        if isinstance(error, LEFT):
            self._num_choices = num_choices
            self.on_broken_off(error)
        else:
            self._has_ended = True
            self._observe_error(error)
            if self.queued_at is not None:  # otherwise overload would log a line for each refusal
                self._log_end(reason_of(error), self._clock())

    def _observe_error(self, error: BaseException | None) -> None:
        duration = {REQUEST_DURATION: self._clock() - self.arrived_at}
        self._metrics.observe_operation(self._operation, duration, reason_of(error))

    def _count_end(self, output: EngineOutput) -> None:
        """Count the end of a choice, once: its reader may end it before the engine."""
        assert output.finish_reason is not None, "the choice goes on"
        if output.choice not in self._ended:
            self._ended.add(output.choice)
            self._metrics.count_end(output.finish_reason.value)

    def _on_first(self, at: float) -> None:
        self.first_at = at
        values = {FIRST_TOKEN: at - self.arrived_at}
        if self.scheduled_at is not None:
            values[PREFILL_TIME] = at - self.scheduled_at
        self._metrics.observe(values)

    def _on_end(self, output: EngineOutput, longest: int, at: float) -> None:
        assert self.first_at is not None, "an end without a token"
        assert output.finish_reason is not None, "the last output has one"
        self._has_ended = True
        reason = output.finish_reason.value
        decode_s = at - self.first_at
        values: dict[str, float] = {
            END_TO_END: at - self.arrived_at,
            DECODE_TIME: decode_s,
            PROMPT_TOKENS: output.num_prompt_tokens,
            GENERATION_TOKENS: output.num_output_tokens - self._num_resumed,
            MAX_GENERATION_TOKENS: longest,
            TIME_PER_OUTPUT_TOKEN: decode_s / max(1, longest - 1),
        }
        if self.scheduled_at is not None:
            values[INFERENCE_TIME] = at - self.scheduled_at
        if self._params is not None:
            values[PARAMS_N] = self._params.n
            if self._params.max_tokens is not None:
                values[PARAMS_MAX_TOKENS] = self._params.max_tokens
        self._metrics.observe(values)
        latencies = {REQUEST_DURATION: values[END_TO_END]}
        latencies[TO_FIRST_TOKEN] = self.first_at - self.arrived_at
        if longest > 1:
            latencies[PER_OUTPUT_TOKEN] = values[TIME_PER_OUTPUT_TOKEN]
        self._metrics.observe_operation(self._operation, latencies)
        self._log_end(reason, at)

    def _log_end(self, reason: str, at: float) -> None:
        """Log one line with numbers only; prompts and outputs are private."""
        if not logger.isEnabledFor(logging.INFO):
            return
        fields: dict[str, object] = {"request_id": self._request_id, "finish_reason": reason}
        last = self.latest
        if last is not None and self.first_at is not None:
            speculation = last.speculation
            fields |= {
                "prompt_tokens": last.num_prompt_tokens,
                "output_tokens": last.num_output_tokens,
                "time_to_first_token_s": round(self.first_at - self.arrived_at, 4),
                "num_drafts": speculation.num_drafts,
                "num_draft_tokens": speculation.num_draft_tokens,
                "num_accepted_tokens": speculation.num_accepted_tokens,
            }
        logger.info("request ended", extra={**fields, "duration_s": round(at - self.arrived_at, 4)})


def reason_of(error: BaseException | None) -> str:
    """Return the finish reason to log and trace for a request that ended early."""
    return ABORTED if isinstance(error, LEFT) else type(error).__name__
