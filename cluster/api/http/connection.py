"""The server's side of an HTTP connection, with limits on clients that send or read nothing.

uvicorn's parser keeps header names and values, chunk extensions and trailers of any size, and drops
the body of a request that offers HTTP/2. Its responses wait indefinitely for clients that do not
read, and send head and body apart. A connection that is reset between requests stays in memory
until it would have been idle for too long.
"""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import chain
from typing import Any

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from cluster.api.base.openai_errors import failure_of
from specdec.types.errors import HeadersTooLargeError, InvalidValueError, SpecdecError

MAX_HEADER_BYTES = 64 * 1024
"""Size of a request's target and headers together, the default of uvicorn's other parser."""

HEADER_TIMEOUT_S = 10.0
"""Limit for a header block to arrive, from the connection or the first byte on."""

KEEP_ALIVE_S = 120
"""Idle time after which a connection ends; proxies keep theirs for a minute or more."""

LINGER_S = 10.0
"""Limit for the rest of a request to arrive whose response closes the connection."""

MAX_LINGERING_BYTES = 32 * 2**20
"""Size of that rest, which is discarded. A connection that is closed while its client sends is
reset, and the reset may overtake the response (RFC 9112, section 9.6)."""

WRITE_TIMEOUT_S = 20.0
"""Limit for a client to read any part of what is buffered for it."""

CONNECTION_LOST = "specdec.connection_lost"
"""Name of a future in the state of a scope, which is done when the connection ends."""

BODY_ARRIVED = "specdec.body_arrived"
"""Name in the state of a scope whose request has arrived completely."""

MAX_CONNECTIONS = 1000
"""Beyond this, the connection that has waited longest for its client is closed for a new one. So
clients that send nothing take no place of a probe. Connections with a request are not closed."""


class BoundedConnection(HttpToolsProtocol):
    """Connection with limits of time and size on what its client sends.

    It is closed with 431 when a header block is too large, and without a response when a header
    block, or the reader of a response, takes too long. uvicorn creates it for each connection.
    """

    _num_unparsed = 0
    """Bytes since the parser has completed a header block or a part of a body."""
    _waiting_since_s: float | None = None
    """By the event loop's clock; None while a complete request is processed."""
    _is_refused = False
    """True once what arrives is no request: the responses before it are completed."""
    _is_lingering = False
    """True once what arrives belongs to a request whose response closes the connection."""
    _num_discarded = 0
    """Bytes that have arrived since either."""
    _receive_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, and close another one if there are too many."""
        super().connection_made(transport)
        self._lost: asyncio.Future[None] = self.loop.create_future()
        self._waiting_since_s = self.loop.time()
        self._start_header_timer()
        if len(self.connections) > MAX_CONNECTIONS:
            self._close_longest_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request, which is cancelled."""
        self._stop_receive_timer()
        self._stop_write_timer()
        self._unset_keepalive_if_required()  # also after a reset, unlike uvicorn
        super().connection_lost(exc)
        if not self._lost.done():
            self._lost.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived."""
        if self._is_refused or self._is_lingering:
            self._num_discarded += len(data)
            if self._num_discarded > MAX_LINGERING_BYTES:
                self.transport.close()
                return
        if self._is_refused:
            return
        self._num_unparsed += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._is_between_requests and self._receive_timer is None:  # in a header block
            self._start_header_timer()
        if self._num_unparsed > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._refuse(HeadersTooLargeError(MAX_HEADER_BYTES))

    def _parse(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._feed(rest) :]
        except httptools.HttpParserError:
            self._refuse(InvalidValueError("request", "malformed", "valid HTTP/1.1"))

    def _feed(self, data: memoryview) -> int:
        """Parse until a request offers another protocol; return the number of parsed bytes."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._offers_upgrade:
                self._ignore_upgrade()
                return int(upgrade.args[0])
        return len(data)

    @property
    def _offers_upgrade(self) -> bool:
        """Return whether a request offers to go on in another protocol; none is served."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _should_upgrade(self) -> bool:
        """Return that no WebSocket begins, for the base class: Serve's proxy would begin one."""
        return False

    def _ignore_upgrade(self) -> None:
        """Parse the head of a request again, without its offer (RFC 9110, section 7.8).

        Otherwise httptools takes what follows it for the other protocol.
        """
        version = self.parser.get_http_version().encode()
        head = [b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)]
        head += [b"%b: %b\r\n" % pair for pair in self.headers if pair[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(b"".join([*head, b"\r\n"]))

    def on_headers_complete(self) -> None:
        """Begin a request, or answer it here if its header block is too large."""
        if self._is_lingering or self._offers_upgrade:
            return
        self._stop_receive_timer()
        self._num_unparsed = 0
        self.scope["state"][CONNECTION_LOST] = self._lost
        app = self.app
        num_bytes = len(self.url) + sum(map(len, chain.from_iterable(self.headers)))
        if num_bytes > MAX_HEADER_BYTES:
            self.app = _respond_431
        if self.parser.get_http_version() == "1.0":
            self.app = partial(_respond_unchunked, self.app)
        super().on_headers_complete()
        self.app = app
        own: Any = _ResponseTransport(self.transport, self.loop)  # all that a response uses
        self.cycle.transport = own
        self.cycle.on_response = partial(self._on_response, own)

    def on_body(self, body: bytes) -> None:
        """Pass on a part of a body."""
        self._num_unparsed = 0
        if not self._is_lingering:
            self._waiting_since_s = self.loop.time()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End what the client sends of a request."""
        self._num_unparsed = 0
        if self._is_lingering:
            self.transport.close()
        elif self._offers_upgrade:
            return
        elif not self._is_between_requests:
            self._waiting_since_s = None
            self.scope["state"][BODY_ARRIVED] = True
            if not self.pipeline:  # the next request waits for the end of this one
                self.flow.resume_reading()  # for the end of the connection
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """End a request."""
        self._waiting_since_s = self.loop.time()
        super().on_response_complete()

    def _on_response(self, own: _ResponseTransport) -> None:
        """End a request, whose response is sent: this connection may write or close from now on."""
        own.send_head()
        self.on_response_complete()

    def pause_writing(self) -> None:
        """Pause a response whose client does not read, and abort the connection after a time."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Continue a response."""
        super().resume_writing()
        self._stop_write_timer()

    @property
    def _is_between_requests(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is None or cycle.response_complete

    def close_after(self, own: Any) -> None:
        """Close the connection; if the last response is complete, after what still arrives.

        own: the response's `_ResponseTransport`.
        """
        cycle = self.cycle  # the latest; the requests before it have arrived
        has_rest = cycle.more_body or self._is_refused
        if not (cycle.transport is own and has_rest and cycle.response_complete):
            self.transport.close()
        elif not self._is_lingering:
            self._is_lingering = True
            self._stop_receive_timer()
            if self.transport.can_write_eof():  # not with TLS
                self.transport.write_eof()
            self._receive_timer = self.loop.call_later(LINGER_S, self.transport.close)

    def _close_longest_waiting(self) -> None:
        waiting = [
            (each._waiting_since_s, id(each), each)
            for each in self.connections
            if isinstance(each, BoundedConnection) and each._waiting_since_s is not None
        ]
        *_, longest = min(waiting)  # this one at least
        self.connections.discard(longest)
        longest.transport.abort()

    def _start_header_timer(self) -> None:
        self._receive_timer = self.loop.call_later(HEADER_TIMEOUT_S, self.transport.abort)

    def _stop_receive_timer(self) -> None:
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _refuse(self, error: SpecdecError) -> None:
        """Close the connection for what is no request, after the responses to whole ones.

        Otherwise with the error, unless a response was sent or is under way.
        """
        if self._is_refused:
            return
        cycle: Any = self.cycle  # None before the first request
        response: Any = failure_of(error).respond()
        response.headers["connection"] = "close"
        is_free = self._is_between_requests
        if not (self._is_lingering or is_free) and (self.pipeline or not cycle.more_body):
            self._is_refused, cycle.keep_alive = True, False
            if cycle.more_body:  # it waits for the responses before it
                self.pipeline[0] = (cycle, response)
            return
        if not self._is_lingering and (is_free or not cycle.response_started):
            head = [STATUS_LINE[response.status_code]]
            head += [b"%b: %b\r\n" % pair for pair in response.raw_headers]
            self.transport.write(b"".join([*head, b"\r\n", bytes(response.body)]))
        self.transport.close()


class _ResponseTransport:
    """Transport of a response, which sends its head with its first body bytes in one system call.

    A head that no body follows in the same iteration of the event loop is sent after it, or when
    the response is complete.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head: bytes | None = None  # b"" once it is sent
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        """Keep the head, or send data after it."""
        if self._head is None:
            self._head = data
            self._loop.call_soon(self.send_head)
        else:
            head, self._head = self._head, b""
            self._transport.write(head + data if head else data)

    def close(self) -> None:
        """Close the connection once the head is sent; see `BoundedConnection.close_after`."""
        self.send_head()
        if not self.is_closing():
            connection: Any = self._transport.get_protocol()  # kept here, it would be a cycle
            connection.close_after(self)

    def send_head(self) -> None:
        """Send the head if it is kept."""
        if self._head and not self._transport.is_closing():
            self.write(b"")


async def _respond_431(scope: Scope, receive: Receive, send: Send) -> None:
    await failure_of(HeadersTooLargeError(MAX_HEADER_BYTES)).respond()(scope, receive, send)


async def _respond_unchunked(app: ASGIApp, scope: Scope, receive: Receive, send: Any) -> None:
    """Let the response to HTTP/1.0, which has no chunks, end with its connection."""
    cycle: RequestResponseCycle = send.__self__
    has_length = False

    async def send_unchunked(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            names = (name.lower() for name, _ in message.get("headers", ()))
            has_length = b"content-length" in names
        if not has_length:
            cycle.chunked_encoding = False
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    await app(scope, receive, send_unchunked)
