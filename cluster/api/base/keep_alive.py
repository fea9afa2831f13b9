"""Bytes that keep the connection of a stream open while it has nothing to send.

A proxy ends a connection without bytes after a minute. Tokens may pause for longer: while other
requests preempt a sequence, between the parts of a thinking budget, or in hidden reasoning.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from starlette.types import Message, Send


class KeepAlive:
    """Sender of a response's messages, with one timer: it sends a comment after each silence.

    An asynchronous context manager, which sends comments until it ends.
    """

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
        self._loop = asyncio.get_running_loop()
        self._sending: asyncio.Task[None] | None = None  # the last comment

    async def send(self, message: Message) -> None:
        """Send a message of the response."""
        self._idle_since_s = math.inf
        await self._send(message)
        if message.get("more_body") or message["type"] == "http.response.start":
            self._idle_since_s = self._now_s()

    async def __aenter__(self) -> KeepAlive:
        """Begin to send comments."""
        self._timer = self._loop.call_later(self._interval_s, self._check)
        return self

    async def __aexit__(self, *error: object) -> None:
        """End it; a comment that is being sent is given up."""
        self._timer.cancel()
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)

    def _check(self) -> None:
        wait_s = self._idle_since_s + self._interval_s - self._now_s()
        if wait_s > 0:
            self._timer = self._loop.call_later(min(wait_s, self._interval_s), self._check)
        else:
            self._sending = self._loop.create_task(self._send_comment())

    async def _send_comment(self) -> None:
        if self._idle_since_s < math.inf:  # otherwise a message is being sent since the check
            self._idle_since_s = self._now_s()
            message = {"type": "http.response.body", "body": self._comment, "more_body": True}
            await self._send(message)
        self._check()
