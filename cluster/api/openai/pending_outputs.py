"""Outputs of a stream that has begun while its prompt is queued or computed.

A proxy ends a connection without bytes after a minute. So the status and the headers are sent when
the engine has admitted the request, with an empty line, which clients skip even if they parse lines
instead of events. A comment follows at each interval until the first output.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from cluster.api.base.sse import EMPTY_LINE
from cluster.api.openai.streams import PromptOutput

Outputs = AsyncGenerator[PromptOutput, None]


class PendingOutputs:
    """Outputs whose first one is awaited in a task. Iterate once; close it in any case."""

    def __init__(self, generate: Callable[[Callable[[], None]], Outputs]) -> None:
        """Start the requests.

        generate: returns their outputs, and calls its argument when the engine has admitted them.
        """
        self._is_admitted = asyncio.get_running_loop().create_future()
        self._outputs = generate(lambda: self._is_admitted.set_result(None))
        self._first = asyncio.create_task(_first_of(self._outputs))

    async def wait_until_admitted(self) -> None:
        """Wait. Raise the error of requests that were not admitted, after closing them."""
        await self._wait(self._is_admitted, self._first)

    async def wait_for_first(self) -> None:
        """Wait for the first output. Raise the error before it, after closing the requests."""
        await self._wait(self._first)

    async def _wait(self, *futures: asyncio.Future[None] | asyncio.Task[PromptOutput]) -> None:
        try:
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if self._first.done():
                self._first.result()
        except BaseException:
            await self.aclose()
            raise

    async def keep_alive(self, interval_s: float, comment: bytes) -> AsyncGenerator[bytes, None]:
        """Yield what is sent before the first output: at once, and then at each interval."""
        if not self._first.done():
            yield EMPTY_LINE
        while not self._first.done():
            await asyncio.wait((self._first,), timeout=interval_s)
            if not self._first.done():
                yield comment

    async def __aiter__(self) -> AsyncIterator[PromptOutput]:
        """Yield all outputs."""
        yield await self._first
        async for each in self._outputs:
            yield each

    async def aclose(self) -> None:
        """End the requests."""
        self._first.cancel()
        await asyncio.gather(self._first, return_exceptions=True)
        await self._outputs.aclose()


class Silence:
    """Time in which a stream sends nothing, although tokens are generated: hidden reasoning."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """limit_s: 0 for no limit. clock: in seconds."""
        self._limit_s = limit_s
        self._clock = clock
        self._began_at_s: float | None = None

    def is_too_long(self, *, has_events: bool) -> bool:
        """Return whether the silence has reached its limit, and begin another.

        has_events: whether the last output had events, after which there is none.
        """
        if has_events:
            self._began_at_s = None
            return False
        now_s = self._clock()
        if self._began_at_s is None:
            self._began_at_s = now_s
        is_too_long = 0 < self._limit_s <= now_s - self._began_at_s
        if is_too_long:
            self._began_at_s = now_s
        return is_too_long


async def _first_of(outputs: Outputs) -> PromptOutput:
    return await anext(outputs)
