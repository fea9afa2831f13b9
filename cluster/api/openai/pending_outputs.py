"""Outputs of a stream that has begun while its prompt is queued or computed.

The status and the headers are sent when the engine has admitted the request, with an empty line,
which clients skip even if they parse lines instead of events.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from cluster.api.openai.streams import PromptOutput

Outputs = AsyncGenerator[PromptOutput, None]


class PendingOutputs:
    """Outputs whose first one is awaited in a task. Iterate once; close it in any case."""

    def __init__(self, generate: Callable[[Callable[[], None]], Outputs]) -> None:
        """Start the requests.

        generate: returns their outputs, and calls its argument when the engine has admitted them.
        """
        self._is_admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outputs = generate(self._admit)
        self._first = asyncio.create_task(_first_of(self._outputs))
        self._first.add_done_callback(self._admit)

    def _admit(self, *_: object) -> None:
        if not self._is_admitted.done():
            self._is_admitted.set_result(None)

    @property
    def has_first(self) -> bool:
        """Return whether the first output, or the error before it, is there."""
        return self._first.done()

    async def wait_until_admitted(self) -> None:
        """Wait. Raise the error of requests that were not admitted, after closing them."""
        await self._wait(self._is_admitted)

    async def wait_for_first(self) -> None:
        """Wait for the first output. Raise the error before it, after closing the requests."""
        await self._wait(self._first)

    async def _wait(self, future: asyncio.Future[Any]) -> None:
        try:
            await future
            if self._first.done():
                self._first.result()
        except BaseException:
            await self.aclose()
            raise

    async def __aiter__(self) -> AsyncIterator[PromptOutput]:
        """Yield all outputs."""
        yield await self._first
        async for each in self._outputs:
            yield each

    async def aclose(self) -> None:
        """End the requests."""
        self._first.cancel()
        if not self._first.done() or self._first.cancelled() or self._first.exception():
            await asyncio.gather(self._first, return_exceptions=True)
        await self._outputs.aclose()


async def _first_of(outputs: Outputs) -> PromptOutput:
    return await anext(outputs)
