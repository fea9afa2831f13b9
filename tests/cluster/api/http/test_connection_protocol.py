# Modules: cluster.api.http.connection
"""Connections that receive other versions and protocols, or bytes that are no HTTP."""

import asyncio
import json

import pytest

from cluster.api.http.connection import (
    MAX_HEADER_BYTES,
    MAX_LINGERING_BYTES,
    BoundedConnection,
)
from tests.cluster.api.http.test_connection import CHUNKED, MAX_READ, MIB, START, hello, status_of
from tests.cluster.http_server import connected, running_server
from tests.waiting import eventually

OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n"
"""As Java's HttpClient sends it with each request without TLS."""

TWO_HEADERS = b"connection: upgrade\r\nconnection: keep-alive\r\nupgrade: h2c\r\n"
WEBSOCKET = (
    b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
INNER = b"GET /inner HTTP/1.1\r\n\r\n"
"""A body that would be answered if it were taken for a request."""


def recording():
    """Return a kind of connection, and what such connections have received."""
    received = []

    class Recorded(BoundedConnection):
        def data_received(self, data):
            super().data_received(data)
            received.append(data)

    return Recorded, received


def streaming():
    """Return an application, and the events of its first response part and of what ends it."""
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        has_begun.set()
        await may_end.wait()
        await send({"type": "http.response.body", "body": b"last", "more_body": False})

    return app, has_begun, may_end


async def echo(scope, receive, send):
    parts, has_more = [], True
    while has_more:
        message = await receive()
        parts.append(message["body"])
        has_more = message["more_body"]
    body = b"<%b %b>" % (scope["path"].encode(), b"".join(parts))
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize(
    "offer", [OFFER, TWO_HEADERS, WEBSOCKET], ids=["one header", "two headers", "WebSocket"]
)
@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize(
    ("framing", "body"),
    [
        (b"content-length: %d\r\n\r\n" % len(INNER), INNER),
        (
            b"transfer-encoding: chunked\r\n\r\n",
            b"%x\r\n%b\r\n0\r\n\r\n" % (len(INNER), INNER),
        ),
    ],
    ids=["length", "chunks"],
)
async def test_a_request_that_offers_another_protocol_is_served(
    version, offer, is_split, framing, body
):
    head = b"POST /first HTTP/%b\r\nhost: localhost\r\n%b%b" % (version, offer, framing)
    kind, received = recording()
    async with running_server(echo, http=kind) as port, connected(port) as client:
        parts = [head, body] if is_split else [head + body]
        for part in parts:
            await client.send(part)
            await eventually(lambda: received[-1:] == [part])  # noqa: B023
        if version == b"1.1":
            await client.send(START.replace(b"/ ", b"/second ") + b"connection: close\r\n\r\n")
        answer = await client.answer()
    assert b"</first %b>" % INNER in answer
    assert (b"</second >" in answer) == (version == b"1.1")
    assert answer.count(b"HTTP/1.1 200") == answer.count(b"<")


async def test_many_requests_with_offers_in_one_segment_are_served():
    num_requests = 1000
    sent = b"GET / HTTP/1.1\r\n" + TWO_HEADERS + b"\r\n"
    async with running_server(echo) as port, connected(port) as client:
        await client.send(sent * num_requests + START + b"connection: close\r\n\r\n")
        answer = await client.answer()
    assert answer.count(b"</ >") == num_requests + 1


async def test_a_tunnel_with_an_offer_of_a_websocket_ends_the_connection():
    """With uvicorn's default, as in Serve's proxy, WebSockets are on."""
    async with running_server(echo, ws="auto") as port, connected(port) as client:
        tunnel = b"CONNECT localhost:1 HTTP/1.1\r\nhost: localhost\r\n" + WEBSOCKET
        await client.send(START + b"\r\n" + tunnel + b"\r\n")
        answer = await client.answer()
    assert answer.count(b"HTTP/1.1 200") == 1
    assert b"connection: close" in answer


@pytest.mark.parametrize("size", [None, b"%d" % len(b"hello")])
async def test_a_response_to_http_1_0_has_no_chunks(size):
    async def app(scope, receive, send):
        headers = [] if size is None else [(b"content-length", size)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"he", "more_body": True})
        await send({"type": "http.response.body", "body": b"llo", "more_body": False})

    async with running_server(app) as port, connected(port) as client:
        await client.send(b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
        head, _, body = (await client.answer()).partition(b"\r\n\r\n")
    assert body == b"hello"
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head


@pytest.mark.parametrize(
    "sent", [b"no HTTP\r\n\r\n", b"GET / HTTP/3.7\r\n\r\n", CHUNKED + b"no size\r\n"]
)
async def test_bytes_that_are_no_request_are_refused(sent):
    async with running_server(hello) as port, connected(port) as client:
        await client.send(sent)
        head, _, body = (await client.answer()).partition(b"\r\n\r\n")
    assert (status_of(head), b"connection: close" in head) == (400, True)
    assert (
        json.loads(body)["error"]["message"] == "request is 'malformed'; it must be valid HTTP/1.1"
    )


@pytest.mark.parametrize(
    ("rest", "num_errors"),
    [
        (b"\x00" * 9, 0),
        (START + b"a: " + b"x" * 2 * MAX_HEADER_BYTES, 0),
        (CHUNKED + b"no size\r\n", 1),
        (INNER + CHUNKED + b"no size\r\n", 1),
    ],
    ids=["no HTTP", "large head", "bad chunk", "bad chunk after a request"],
)
async def test_a_response_is_complete_whatever_follows_its_request(rest, num_errors):
    app, has_begun, may_end = streaming()
    kind, received = recording()
    first = START.replace(b"GET", b"POST") + b"content-length: 1\r\n\r\nx"
    async with running_server(app, http=kind) as port, connected(port) as client:
        await client.send(first)
        await has_begun.wait()
        await client.send(rest)
        await eventually(lambda: b"".join(received) == first + rest)
        may_end.set()
        answer = await client.answer()
    whole = b"5\r\nfirst\r\n4\r\nlast\r\n0\r\n\r\n"
    num_whole = 1 + rest.count(INNER)
    assert (answer.count(whole), answer.count(b"HTTP/1.1 200")) == (num_whole, num_whole)
    assert answer.count(b"HTTP/1.1 400") == answer.count(b"must be valid HTTP") == num_errors
    assert num_errors or answer.endswith(whole)


async def test_what_is_discarded_while_a_response_is_open_is_limited():
    app, has_begun, may_end = streaming()
    async with running_server(app) as port, connected(port) as client:
        await client.send(START + b"\r\n")
        await has_begun.wait()
        await client.send(b"\x00" + MIB, count=400)
        may_end.set()
    assert client.num_sent < MAX_LINGERING_BYTES + MAX_READ


async def test_the_rest_is_discarded_after_a_response_to_a_whole_request():
    """A connection closed while bytes arrive is reset, and the response may be lost."""
    app, has_begun, may_end = streaming()
    kind, received = recording()
    async with running_server(app, http=kind) as port, connected(port) as client:
        await client.send(START + b"\r\n")
        await has_begun.wait()
        await client.send(b"\x00")
        await eventually(lambda: received[-1].endswith(b"\x00"))
        may_end.set()
        answer = await client.answer()
        await client.send(b"rest")
        await eventually(lambda: received[-1] == b"rest")
    assert answer.endswith(b"0\r\n\r\n")
