"""The server's side of an HTTP connection, with limits on clients that send or read nothing.

uvicorn's parser keeps header names and values, chunk extensions and trailers of any size, and its
responses wait indefinitely for clients that do not read.
"""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from cluster.api.openai.errors import failure_of
from specdec.types.errors import HeadersTooLargeError

MAX_HEADER_BYTES = 64 * 1024
"""Size of a request's target and headers together, the default of uvicorn's other parser."""


WRITE_TIMEOUT_S = 20.0
"""Limit for a client to read any part of what is buffered for it."""


class BoundedConnection(HttpToolsProtocol):
    """Connection that is closed with 431 when a header block is too large.

    uvicorn creates it for each connection, with keyword arguments.
    """

    _num_unparsed = 0
    """Bytes since the parser has completed a header block or a part of a body."""
    _write_timer: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """Pause a response whose client does not read, and abort the connection after a time."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Continue a response."""
        super().resume_writing()
        self._stop_write_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request, which is cancelled."""
        self._stop_write_timer()
        super().connection_lost(exc)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived."""
        self._num_unparsed += len(data)
        super().data_received(data)
        if self._num_unparsed > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._refuse()

    def on_headers_complete(self) -> None:
        """Begin a request, or answer it here if its header block is too large."""
        self._num_unparsed = 0
        app = self.app
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > MAX_HEADER_BYTES:
            self.app = _respond_431
        super().on_headers_complete()
        self.app = app

    def on_body(self, body: bytes) -> None:
        """Pass on a part of a body."""
        self._num_unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request."""
        self._num_unparsed = 0
        super().on_message_complete()

    def _refuse(self) -> None:
        """Close the connection, with a response unless one is under way."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete:
            response = failure_of(HeadersTooLargeError(MAX_HEADER_BYTES)).respond()
            head = [STATUS_LINE[431], *(b"%b: %b\r\n" % pair for pair in response.raw_headers)]
            self.transport.write(b"".join([*head, b"\r\n", bytes(response.body)]))
        self.transport.close()


async def _respond_431(scope: Scope, receive: Receive, send: Send) -> None:
    await failure_of(HeadersTooLargeError(MAX_HEADER_BYTES)).respond()(scope, receive, send)
