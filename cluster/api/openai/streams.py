"""Answers on their way: outputs of several prompts as one stream, deadlines, server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from cluster.api.api_keys import Lease
from cluster.api.openai.deadline import Deadline
from cluster.replica.router import Router
from specdec.types.outputs import RequestOutput
from specdec.types.request import GenerateRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


@dataclass(frozen=True)
class Said:
    """An output, and the index of the prompt that it is for."""

    prompt: int
    output: RequestOutput


class ToldError(Exception):
    """A stream has ended with an error, and its last event has told so."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        super().__init__(error)


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


def answering(
    router: Router, calls: Sequence[GenerateRequest], deadline: Deadline
) -> AsyncGenerator[Said, None]:
    """What is said to each prompt, as it comes. Leaving it aborts what runs.

    Raises what the router and the engine raise, and ApiError 504 when the time is up.
    """
    said = _one(router, 0, calls[0]) if len(calls) == 1 else _all(router, calls)
    return _within(deadline, said)


async def _one(router: Router, index: int, call: GenerateRequest) -> AsyncGenerator[Said, None]:
    generation = await router.generate(call)
    async with aclosing(generation.outputs) as outputs:
        async for output in outputs:
            yield Said(index, output)


async def _all(router: Router, calls: Sequence[GenerateRequest]) -> AsyncGenerator[Said, None]:
    """The first error ends all of them."""
    queue: asyncio.Queue[Said | Exception | None] = asyncio.Queue()

    async def run(index: int, call: GenerateRequest) -> None:
        try:
            async with aclosing(_one(router, index, call)) as said:
                async for each in said:
                    queue.put_nowait(each)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(run(index, call)) for index, call in enumerate(calls)]
    num_left = len(tasks)
    try:
        while num_left:
            each = await queue.get()
            if isinstance(each, Exception):
                raise each
            if each is None:
                num_left -= 1
            else:
                yield each
    finally:
        await _cancel(*tasks)


async def _within(
    deadline: Deadline, said: AsyncGenerator[Said, None]
) -> AsyncGenerator[Said, None]:
    async with aclosing(said):
        while True:
            async with deadline.held():
                each = await anext(said, None)
            if each is None:
                return
            yield each


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns, which is cancelled when the client goes: ClientGoneError then.

    To be called when the body has been read: what comes after it is the end of the connection.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        await _cancel(task, gone)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(StreamingResponse):
    """Server-sent events. However it ends, the events are closed and the lease is given back.

    A client that does not read is left some time after the deadline, which the events tell of.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        source: AsyncGenerator[Any, None],
        deadline: Deadline,
        grace_s: float = 5.0,
    ) -> None:
        """`source`: what the events are made of. It has begun, where the events may never.

        grace_s: seconds after the deadline for what is still to be sent.
        """
        super().__init__(events, media_type="text/event-stream", headers=_HEADERS)
        self._closed_at_end = (events, source)
        self._deadline = deadline
        self._grace_s = grace_s
        self.lease = Lease()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends them until they end or the client goes, which Serve tells by cancelling."""
        time_to_send = asyncio.timeout(self._deadline.left_s + self._grace_s)
        try:
            async with time_to_send:
                await super().__call__(scope, receive, send)
        except TimeoutError:
            if not time_to_send.expired():
                raise
            logger.warning("a stream is ended: its client has stopped reading")
        finally:
            self.lease.release()
            for each in self._closed_at_end:
                await each.aclose()


def event(data: str, name: str | None = None) -> bytes:
    """One event. JSON has no line breaks of its own, so one line of data holds it."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {data}\n\n".encode()


async def chained(first: T, others: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """One that has come already, and then the others, which are closed with it."""
    async with aclosing(others):
        yield first
        async for each in others:
            yield each
