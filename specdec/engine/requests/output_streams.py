"""The asyncio streams of an engine's open requests."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable

from specdec.engine.metrics.request_metrics import RequestMetrics
from specdec.engine.requests.outputs import Delivery, continued, joined
from specdec.types.deadline import Deadline
from specdec.types.errors import AbortedError, OverloadedError
from specdec.types.request import Caller
from specdec.types.responses import EngineOutput

logger = logging.getLogger(__name__)


_MAX_PARTS = 64
"""Most outputs that are joined to one; those that wait are joined once there are as many."""

_MAX_TOKENS = _MAX_PARTS * _MAX_PARTS
"""Most tokens of an output that is made of tokens."""


class OutputStream:
    """The outputs of a request that wait for its reader, and its measurements.

    A reader gets all that has come for a choice as one output. So the more it lags behind, because
    the event loop is busy or its client reads slowly, the fewer and larger its outputs are.
    """

    def __init__(self, unique_id: str, metrics: RequestMetrics | None, caller: Caller) -> None:
        """unique_id: of the request, for its engine. caller: may abort it."""
        self.unique_id = unique_id
        self.metrics = metrics
        self.caller = caller
        self.timer: asyncio.TimerHandle | None = None  # of the deadline
        self._parts: dict[int, list[EngineOutput]] = {}  # by choice, the oldest first
        self._token_ids: list[int] = []  # after all parts
        self._latest: EngineOutput | None = None  # before these tokens
        self._last: EngineOutput | None = None  # of the request, which is read after all others
        self._error: Exception | None = None
        self._arrival: asyncio.Future[None] | None = None  # that the reader waits for

    def put(self, output: EngineOutput) -> None:
        """Add an output, which costs memory by token if it waits; none after an error."""
        if self._error is not None:
            return
        while self._token_ids:
            self._parts.setdefault(0, []).append(self._take_tokens())
        self._latest = output
        if output.is_last:
            self._last = output
        else:
            parts = self._parts.setdefault(output.choice, [])
            parts.append(output)
            if len(parts) >= _MAX_PARTS and parts[-_MAX_PARTS].num_steps < _MAX_PARTS:
                parts[-_MAX_PARTS:] = [joined(parts[-_MAX_PARTS:])]
        self._wake()

    def put_token(self, token_id: int) -> None:
        """Add the output of a plain decode, after another one; see `Delivery`."""
        if self._error is None:
            self._token_ids.append(token_id)
            self._wake()

    def _take_tokens(self) -> EngineOutput:
        """Return the first tokens that wait as an output."""
        token_ids, self._token_ids = self._token_ids[:_MAX_TOKENS], self._token_ids[_MAX_TOKENS:]
        last, num_tokens = self._latest, len(token_ids)
        assert last is not None, "further tokens without first ones"
        count = last.num_output_tokens + num_tokens
        self._latest = continued(last, tuple(token_ids), count, last.speculation, num_tokens)
        return self._latest

    def fail(self, error: Exception) -> None:
        """End the stream with an error, after the outputs that have come."""
        self._error = self._error or error
        self._wake()

    def expire(self, deadline: Deadline) -> None:
        """Fail at the deadline of the request."""
        self.fail(deadline.error)

    async def wait_for(self, admission: asyncio.Future[None]) -> None:
        """Wait until the engine has the request. Raises its refusal, or what ended it before."""
        self._arrival = admission
        await admission
        self._raise_error()

    async def take(self) -> EngineOutput:
        """Wait for outputs of a choice, and return them as one.

        Raises the error that ends the stream.
        """
        while not self._has_output:
            self._raise_error()
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        if not self._parts and self._last is None:
            return self._take_tokens()
        last, parts = self._last, []
        if self._parts:
            choice, waiting = next(iter(self._parts.items()))
            parts, left = waiting[:_MAX_PARTS], waiting[_MAX_PARTS:]
            if left:
                self._parts[choice] = left
            else:
                del self._parts[choice]
        if last is not None and not self._parts and (not parts or parts[0].choice == last.choice):
            parts.append(last)
            self._last = None
        return joined(parts)

    def _raise_error(self) -> None:
        """Raise the error that ends the stream, if no output is left before it."""
        if self._error is not None and not self._has_output:
            raise self._error

    @property
    def _has_output(self) -> bool:
        return bool(self._token_ids or self._parts) or self._last is not None

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


class OutputStreams:
    """Distributes the outputs of an engine to its requests, on one event loop.

    num_sequences: choices that have not ended; any thread may read it.
    """

    def __init__(self, prefix: str = "") -> None:
        """prefix: of the serial number in each unique id."""
        self._prefix = prefix
        self._streams: dict[str, OutputStream] = {}
        self._num_choices: dict[str, int] = {}  # that have not ended, by request
        self.num_sequences = 0
        self._serial = itertools.count()
        self._none_left = asyncio.Event()
        self._none_left.set()

    @property
    def num_requests(self) -> int:
        """Requests that have not ended, queued or running."""
        return len(self._num_choices)

    @property
    def num_open(self) -> int:
        """Open streams, with those whose last output has not been read."""
        return len(self._streams)

    def open(
        self,
        request_id: str,
        num_choices: int,
        metrics: RequestMetrics | None,
        caller: Caller,
        deadline: Deadline | None,
    ) -> OutputStream:
        """Open a stream, which fails at the deadline."""
        unique_id = f"{request_id}/{self._prefix}{next(self._serial)}"
        stream = self._streams[unique_id] = OutputStream(unique_id, metrics, caller)
        self._num_choices[unique_id] = num_choices
        self.num_sequences += num_choices
        self._none_left.clear()
        if deadline is not None:
            loop = asyncio.get_running_loop()
            stream.timer = loop.call_later(deadline.remaining_s, stream.expire, deadline)
        return stream

    def close(self, stream: OutputStream) -> None:
        """Forget a stream that is no longer read."""
        del self._streams[stream.unique_id]
        if stream.timer is not None:
            stream.timer.cancel()
        self._end(stream.unique_id)
        if not self._streams:
            self._none_left.set()

    def _end(self, unique_id: str) -> None:
        """Count the choices of a request no longer; of one that has ended there are none."""
        self.num_sequences -= self._num_choices.pop(unique_id, 0)

    async def all_close_within(self, timeout_s: float) -> bool:
        """Wait until no stream is open; return False if some still are after `timeout_s`."""
        try:
            await asyncio.wait_for(self._none_left.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def deliver(self, step: Delivery, newly_scheduled: tuple[str, ...]) -> None:
        """Put the outputs of a step into their streams and record them."""
        now_s = time.perf_counter()
        for unique_id in newly_scheduled:
            stream = self._streams.get(unique_id)
            if stream is not None and stream.metrics is not None:
                stream.metrics.on_scheduled(now_s)
        for output in step.outputs:
            self._deliver(output, now_s)
        for unique_id, token_id in zip(step.request_ids, step.token_ids, strict=True):
            stream = self._streams.get(unique_id)
            if stream is not None:
                stream.put_token(token_id)
                if stream.metrics is not None:
                    stream.metrics.on_token(now_s)

    def _deliver(self, output: EngineOutput, now_s: float) -> None:
        if output.is_last:
            self._end(output.request_id)
        elif output.finish_reason is not None and output.request_id in self._num_choices:
            self._num_choices[output.request_id] -= 1
            self.num_sequences -= 1
        stream = self._streams.get(output.request_id)
        if stream is None:
            return  # its reader has closed it, and the abort is queued
        if output.error is not None:
            logger.error("request %s failed: %s", output.request_id, output.error)
            stream.fail(output.error)
            return
        stream.put(output)
        if stream.metrics is not None:
            stream.metrics.on_output(output, now_s)

    def expire(self, unique_ids: list[str]) -> None:
        """Fail requests that were queued past their deadline."""
        for unique_id in unique_ids:
            self._end(unique_id)
            stream = self._streams.get(unique_id)
            if stream is not None:
                error = OverloadedError("the request waited in the queue past its deadline")
                stream.fail(error)

    def abort(self, is_ended: Callable[[str, Caller], bool]) -> None:
        """End streams, which then raise AbortedError. is_ended: of a request's id and caller."""
        for unique_id, stream in self._streams.items():
            request_id = unique_id.rpartition("/")[0]
            if is_ended(request_id, stream.caller):
                stream.fail(AbortedError(request_id))

    def fail(self, error: Exception) -> None:
        """End all streams with an error."""
        self._num_choices.clear()
        self.num_sequences = 0
        for stream in self._streams.values():
            stream.fail(error)
