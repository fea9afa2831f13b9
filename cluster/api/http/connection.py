"""The server's side of an HTTP connection, with a limit on what is buffered before a request.

uvicorn's parser keeps header names and values, chunk extensions and trailers of any size.
"""

from __future__ import annotations

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


class BoundedConnection(HttpToolsProtocol):
    """Connection that is closed with 431 when a header block is too large.

    uvicorn creates it for each connection, with keyword arguments.
    """

    _num_unparsed = 0
    """Bytes since the parser has completed a header block or a part of a body."""

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
