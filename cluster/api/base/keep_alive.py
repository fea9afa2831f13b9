"""Bytes that keep the connection of a stream open while it has nothing to send.

A proxy ends a connection without bytes after a minute. Tokens may pause for longer: while other
requests preempt a sequence, between the parts of a thinking budget, or in hidden reasoning.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from starlette.types import Message, Send


class KeepAlive:
    """Sender of a response's messages, with one timer: it sends a comment after each silence."""

    def __init__(
        self,
        send: Send,
        comment: bytes,
        interval_s: float,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """send: sends a message. comment: sent once nothing was sent for `interval_s` seconds."""
        self._send = send
        self._comment = comment
        self._interval_s = interval_s
        self._now_s = now_s
        self._idle_since_s = math.inf  # infinite while nothing is to be kept alive

    async def send(self, message: Message) -> None:
        """Send a message of the response."""
        self._idle_since_s = math.inf
        await self._send(message)
        if message.get("more_body") or message["type"] == "http.response.start":
            self._idle_since_s = self._now_s()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        """Send comments until the end of the `async with`."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            wait_s = self._idle_since_s + self._interval_s - self._now_s()
            if wait_s > 0:
                await asyncio.sleep(min(wait_s, self._interval_s))
                continue
            self._idle_since_s = self._now_s()
            message = {"type": "http.response.body", "body": self._comment, "more_body": True}
            await self._send(message)
