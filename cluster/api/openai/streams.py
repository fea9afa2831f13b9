"""Streams of outputs: their first one, deadlines, disconnects, event streams."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from cluster.api.base.authentication import Lease
from cluster.api.base.keep_alive import KeepAlive
from cluster.api.base.sse import COMMENT, STREAM_HEADERS
from cluster.api.http.connection import CONNECTION_LOST
from specdec.types.deadline import CancelScope, Deadline, TimeLimit
from specdec.types.responses import EngineOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

_RAW_HEADERS = StreamingResponse((), 200, STREAM_HEADERS, "text/event-stream").raw_headers


class PromptOutput(NamedTuple):
    """An output with the index of its prompt."""

    prompt: int
    output: EngineOutput


Outputs = AsyncGenerator[PromptOutput, None]


class LastEvents(bytes):
    """The last events of a stream, which are sent with its end."""


class ClientDisconnectedError(ClientDisconnect):
    """The client closed the connection before the response was complete."""


class _NotReadError(Exception):
    """The client did not read its stream in time."""


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; cancel it and raise ClientDisconnectedError on a disconnect.

    Call this after the body has been read: the next message is the end of the connection.
    """
    watch = DisconnectWatch(request.scope, request.receive)
    try:
        with watch:
            return await work
    finally:
        watch.close()


class DisconnectWatch(CancelScope):
    """Watch for the disconnect of a request's client: of our own server's connection, else a task.

    A context manager, which may be entered several times: a disconnect cancels its body, which then
    raises ClientDisconnectedError.
    """

    _waiting: asyncio.Task[None] | None = None

    def __init__(self, scope: Scope, receive: Receive) -> None:
        """Start to watch. Needs `close`."""
        super().__init__(ClientDisconnectedError)
        lost: asyncio.Future[None] | None = scope.get("state", {}).get(CONNECTION_LOST)
        if lost is None:
            lost = self._waiting = asyncio.create_task(_wait_for_disconnect(receive))
        self._lost = lost

    def __enter__(self) -> None:
        super().__enter__()
        self._lost.add_done_callback(self._cancel)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._lost.remove_done_callback(self._cancel)
        super().__exit__(kind)

    def close(self) -> None:
        """End the task, if there is one."""
        if self._waiting is not None:
            self._waiting.cancel()

    def _cancel(self, lost: asyncio.Future[None]) -> None:
        if not lost.cancelled():
            self.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    with suppress(Exception):  # of the connection, which is its end
        while (await receive())["type"] != "http.disconnect":
            pass


class Closable(Protocol):
    """A source of events, such as an asynchronous generator or `PendingOutputs`."""

    async def aclose(self) -> None:
        """End the requests of the source."""


class PendingOutputs:
    """Outputs whose first one is awaited in a task. Iterate once; close it in any case."""

    def __init__(self, generate: Callable[[Callable[[], None]], Outputs]) -> None:
        """Start the requests.

        generate: returns their outputs, and calls its argument when the engine has admitted them.
        """
        self._is_admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        admit = partial(_set_done, self._is_admitted)  # no cycle, which would keep the prompt
        self._outputs = generate(admit)
        self._first = asyncio.create_task(_first_of(self._outputs))
        self._first.add_done_callback(admit)

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


def _set_done(future: asyncio.Future[None], *_: object) -> None:
    if not future.done():
        future.set_result(None)


class EventStream(Response):
    """Response of server-sent events that always closes its generators and releases its lease.

    A client that does not read is disconnected `grace_s` after the deadline.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        source: Closable,
        deadline: Deadline,
        grace_s: float = 5.0,
        *,
        keep_alive_s: float = 0.0,
        comment: bytes = COMMENT,
    ) -> None:
        """Stream `events`, made from `source`, which has started even if `events` never does.

        grace_s: seconds after the deadline for events that are still to be sent. keep_alive_s:
        seconds without an event after which `comment` is sent; 0: never.
        """
        self.status_code, self.background = 200, None
        self.raw_headers = list(_RAW_HEADERS)  # without the work of Response.__init__
        self._events = events
        self._closed_at_end: tuple[Closable, ...] = (events, source)
        self._deadline = deadline
        self._grace_s = grace_s
        self._keep_alive_s = keep_alive_s
        self._comment = comment
        self.lease = Lease()
        self.watch: DisconnectWatch | None = None  # of the client, if there is one already

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client disconnects; Serve cancels then."""
        watch = self.watch = self.watch or DisconnectWatch(scope, receive)
        time_to_send_s = self._deadline.remaining_s + self._grace_s
        try:
            with TimeLimit(time_to_send_s, _NotReadError), suppress(ClientDisconnectedError), watch:
                await self._respond(send)
        except _NotReadError:
            logger.warning("stream closed: the client has stopped reading")
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """End the requests, and release what the stream holds; a call of the stream does that."""
        if self.watch is not None:
            self.watch.close()
        self.lease.release()
        for each in self._closed_at_end:
            await each.aclose()

    async def _respond(self, send: Send) -> None:
        if self._keep_alive_s == 0:
            await self._send_events(send)
            return
        async with KeepAlive(send, self._comment, self._keep_alive_s) as sender:
            await self._send_events(sender.send)

    async def _send_events(self, send: Send) -> None:
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        is_open = True
        async for data in self._events:
            is_open = not isinstance(data, LastEvents)
            await send({"type": "http.response.body", "body": data, "more_body": is_open})
        if is_open:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def chained(first: T, others: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Yield an item that was already received and then the others; close them with this."""
    async with aclosing(others):
        yield first
        async for each in others:
            yield each
