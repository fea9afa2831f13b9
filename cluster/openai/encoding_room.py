"""How many prompts of one replica may be rendered and encoded at once, and how many may wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from specdec.errors import OverloadedError

T = TypeVar("T")

MAX_RUNNING = 2
MAX_INSIDE = 64
"""Those that wait included. Each holds a body of up to `http_max_body_mib`."""


class EncodingRoom:
    """Lets work in as long as there is room. Kept by the event loop's thread alone."""

    def __init__(self, max_running: int = MAX_RUNNING, max_inside: int = MAX_INSIDE) -> None:
        """`max_inside`: those that run and those that wait."""
        self._turn = asyncio.Semaphore(max_running)
        self._max_inside = max_inside
        self.num_inside = 0

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What `work` returns. Raises OverloadedError at once where there is no room.

        A thread cannot be stopped: work that has begun keeps its place until it is done, also
        when nobody waits for it any more.
        """
        if self.num_inside >= self._max_inside:
            raise OverloadedError(f"{self.num_inside} prompts wait to be encoded")
        self.num_inside += 1
        try:
            await self._turn.acquire()
        except BaseException:
            self.num_inside -= 1
            raise
        task = asyncio.create_task(work())
        task.add_done_callback(self._leave)
        return await asyncio.shield(task)

    def _leave(self, task: asyncio.Task[Any]) -> None:
        self.num_inside -= 1
        self._turn.release()
        if not task.cancelled():
            task.exception()  # looked at: nobody may be waiting any more
