# Modules: cluster.api.http.connection
"""Connections that are closed by a response while their clients still send."""

import asyncio

import pytest

from cluster.api.http import connection
from cluster.api.http.connection import MAX_HEADER_BYTES, MAX_LINGERING_BYTES
from tests.cluster.api.http.test_connection import CHUNKED, MAX_READ, MIB, START, status_of
from tests.cluster.http_server import connected, running_server

UPGRADE = (
    b"0\r\n\r\nGET / HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
)


async def refuse(scope, receive, send):
    """Respond before the body is read."""
    headers = [(b"connection", b"close"), (b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_response_reaches_clients_that_send_their_whole_body_first(is_chunked):
    """It is the only one: what follows on the connection is no request."""
    async with running_server(refuse) as port, connected(port) as client:
        if is_chunked:
            await client.send(CHUNKED)
            await client.send(b"100000\r\n" + MIB + b"\r\n", count=20)
            await client.send(b"0\r\n\r\n")
        else:
            await client.send(START + b"content-length: %d\r\n\r\n" % (20 * len(MIB)))
            await client.send(MIB, count=20)
        await client.send(START + b"\r\n")
        answer = await client.answer()
    assert client.num_sent > 20 * len(MIB)
    assert (status_of(answer), answer.count(b"HTTP/1.1")) == (413, 1)


@pytest.mark.parametrize("sent", [START + b"\r\n", START + b"content-length: 3\r\n\r\nab"])
async def test_no_rest_is_awaited_after_a_whole_request_or_a_response_that_fails(sent):
    """The connection is closed for both directions, or the next writes would succeed."""

    async def fail(scope, receive, send):
        scope["state"].clear()  # as Serve's proxy does
        is_whole = not sent.endswith(b"ab")
        headers = [(b"connection", b"close"), (b"content-length", b"5")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"hello"[: 5 if is_whole else 2]})

    async with running_server(fail) as port, connected(port) as client:
        await client.send(sent)
        assert status_of(await client.answer()) == 200
        await client.until_refused()


async def test_a_request_before_the_last_one_closes_the_connection():
    """The last one has not arrived; it neither begins nor keeps the connection open."""
    began = []

    async def close(scope, receive, send):
        began.append(scope["path"])
        await asyncio.sleep(0.05)
        await refuse(scope, receive, send)

    async with running_server(close) as port, connected(port) as client:
        await client.send(START + b"\r\n")
        await client.send(START.replace(b"/ ", b"/second ") + b"content-length: 3\r\n\r\nab")
        assert status_of(await client.answer()) == 413
        await client.until_refused()
    assert began == ["/"]


async def test_the_rest_of_a_request_is_discarded_to_a_limit_of_size():
    async with running_server(refuse) as port, connected(port) as client:
        await client.send(CHUNKED)
        await client.send(b"100000\r\n" + MIB + b"\r\n", count=400)
        await client.answer()
    assert client.num_sent < MAX_LINGERING_BYTES + MAX_READ


async def test_the_rest_of_a_request_is_discarded_for_a_limited_time(monkeypatch):
    monkeypatch.setattr(connection, "LINGER_S", 0.05)
    async with running_server(refuse) as port, connected(port) as client:
        await client.send(CHUNKED)
        await client.answer()
        await client.until_refused()


@pytest.mark.parametrize("rest", [UPGRADE, b"no chunk\r\n", b"1;a=" + b"x" * 2 * MAX_HEADER_BYTES])
async def test_a_malformed_rest_of_a_request_gets_no_further_response(rest):
    async with running_server(refuse) as port, connected(port) as client:
        await client.send(CHUNKED)
        answer = await client.receive()
        await client.send(rest)
        answer += await client.answer()
    assert (status_of(answer), answer.count(b"HTTP/1.1")) == (413, 1)
