"""How many prompts of one replica are rendered and encoded at once, and how much may wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from specdec.types.errors import OverloadedError

T = TypeVar("T")

MAX_RUNNING = 2
MAX_CHARS = 8_000_000
"""Of those inside, in characters: what waits longest waits some seconds, and holds no more memory
than that."""

_MIN_CHARS = 1_000
"""What the smallest prompt counts, for what it costs besides its characters."""


class EncodingRoom:
    """Lets work in as long as there is room. Kept by the event loop's thread alone."""

    def __init__(self, max_running: int = MAX_RUNNING, max_chars: int = MAX_CHARS) -> None:
        """max_chars: of what runs and what waits together."""
        self._turn = asyncio.Semaphore(max_running)
        self._max_chars = max_chars
        self.num_chars = 0

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]], num_chars: int) -> T:
        """What `work` returns, which is about so many characters or tokens.

        Raises OverloadedError at once where there is no room; alone, work of any size has. A thread
        cannot be stopped: work that has begun keeps its place until it is done, also when nobody
        waits for it any more.
        """
        size = max(num_chars, _MIN_CHARS)
        if self.num_chars and self.num_chars + size > self._max_chars:
            raise OverloadedError(f"{self.num_chars} characters of prompts wait to be encoded")
        self.num_chars += size
        try:
            await self._turn.acquire()
        except BaseException:
            self.num_chars -= size
            raise
        task = asyncio.create_task(work())
        task.add_done_callback(lambda done: self._leave(done, size))
        return await asyncio.shield(task)

    def _leave(self, task: asyncio.Task[Any], size: int) -> None:
        self.num_chars -= size
        self._turn.release()
        if not task.cancelled():
            task.exception()  # looked at: nobody may be waiting any more
