"""An event loop on a separate thread, for synchronous callers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_GRACE_S = 1.0


class EventLoopThread:
    """Runs coroutines until it is stopped, at the latest with the interpreter."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="llm", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_forever()
        if tasks := asyncio.all_tasks(self._loop):
            self._loop.run_until_complete(_end(tasks))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine; call it from another thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        """Stop the thread and wait for it. Running tasks are cancelled after a second."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            if (
                threading.current_thread() is not self._thread
            ):  # the garbage collector runs here, too
                self._thread.join()


async def _end(tasks: set[asyncio.Task[Any]]) -> None:
    _, late = await asyncio.wait(tasks, timeout=_GRACE_S)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
