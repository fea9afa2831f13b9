"""The asyncio streams of an engine's open requests."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specdec.engine.metrics.request_metrics import RequestMetrics
from specdec.types.errors import AbortedError, OverloadedError
from specdec.types.request import Caller
from specdec.types.responses import EngineOutput

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OutputStream:
    """The queue from which the outputs of a caller's request are read, and its measurements."""

    metrics: RequestMetrics | None
    caller: Caller
    outputs: asyncio.Queue[EngineOutput | Exception] = field(default_factory=asyncio.Queue)


class OutputStreams:
    """Distributes the outputs of an engine to its requests, on one event loop."""

    def __init__(self) -> None:
        self._streams: dict[str, OutputStream] = {}
        self._num_choices: dict[str, int] = {}  # that have not ended, by request
        self._serial = itertools.count()
        self._none_left = asyncio.Event()
        self._none_left.set()

    @property
    def num_requests(self) -> int:
        """Requests that have not ended, queued or running."""
        return len(self._num_choices)

    @property
    def num_sequences(self) -> int:
        """Choices that have not ended. Thread-safe."""
        return sum(tuple(self._num_choices.values()))  # copied atomically

    def open(
        self, request_id: str, num_choices: int, metrics: RequestMetrics | None, caller: Caller
    ) -> str:
        """Open a stream and return its unique id; `request_id` need not be unique."""
        unique_id = f"{request_id}/{next(self._serial)}"
        self._streams[unique_id] = OutputStream(metrics, caller)
        self._num_choices[unique_id] = num_choices
        self._none_left.clear()
        return unique_id

    def close(self, unique_id: str) -> None:
        """Forget a stream that is no longer read."""
        del self._streams[unique_id]
        self._num_choices.pop(unique_id, None)
        if not self._streams:
            self._none_left.set()

    async def next_output(self, unique_id: str) -> EngineOutput:
        """Wait for the next output of a request. Raises the error that ends it."""
        output = await self._streams[unique_id].outputs.get()
        if isinstance(output, Exception):
            raise output
        return output

    async def all_close_within(self, timeout_s: float) -> bool:
        """Wait until no stream is open; return False if some still are after `timeout_s`."""
        try:
            await asyncio.wait_for(self._none_left.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def deliver(self, outputs: Sequence[EngineOutput], newly_scheduled: tuple[str, ...]) -> None:
        """Put the outputs of a step into their streams and record them."""
        now_s = time.perf_counter()
        for unique_id in newly_scheduled:
            stream = self._streams.get(unique_id)
            if stream is not None and stream.metrics is not None:
                stream.metrics.on_scheduled(now_s)
        for output in outputs:
            self._deliver(output, now_s)

    def _deliver(self, output: EngineOutput, now_s: float) -> None:
        if output.finish_reason is not None and output.request_id in self._num_choices:
            self._num_choices[output.request_id] -= 1
        if output.is_last:
            self._num_choices.pop(output.request_id, None)
        stream = self._streams.get(output.request_id)
        if stream is None:
            return  # its reader has closed it, and the abort is queued
        if output.error is not None:
            logger.error("request %s failed: %s", output.request_id, output.error)
            stream.outputs.put_nowait(output.error)
            return
        stream.outputs.put_nowait(output)
        if stream.metrics is not None:
            stream.metrics.on_output(output, now_s)

    def expire(self, unique_ids: list[str]) -> None:
        """Fail requests that were queued past their deadline."""
        for unique_id in unique_ids:
            self._num_choices.pop(unique_id, None)
            stream = self._streams.get(unique_id)
            if stream is not None:
                error = OverloadedError("the request waited in the queue past its deadline")
                stream.outputs.put_nowait(error)

    def abort(self, is_ended: Callable[[str, Caller], bool]) -> None:
        """End streams, which then raise AbortedError. is_ended: of a request's id and caller."""
        for unique_id, stream in self._streams.items():
            request_id = unique_id.rpartition("/")[0]
            if is_ended(request_id, stream.caller):
                stream.outputs.put_nowait(AbortedError(request_id))

    def fail(self, error: Exception) -> None:
        """End all streams with an error."""
        self._num_choices.clear()
        for stream in self._streams.values():
            stream.outputs.put_nowait(error)
