"""Connections of the HTTP server: header blocks of any size, and how they are sent."""

import asyncio
import json
import socket
import struct
from contextlib import AsyncExitStack

import pytest

from cluster.api.http import connection
from cluster.api.http.connection import CONNECTION_LOST, MAX_HEADER_BYTES, BoundedConnection
from tests.cluster.http_server import connected, running_server
from tests.waiting import eventually

MIB = b"x" * 2**20
START = b"GET / HTTP/1.1\r\nhost: localhost\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
MAX_READ = 16 * 2**20
"""What the buffers of both sockets hold, beyond the limit itself."""


async def hello(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


def status_of(answer):
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize(
    ("start", "part"),
    [
        (START + b"a: ", MIB),  # one value that does not end
        (START, b"a: b\r\n" * 2**15),  # headers that do not end
        (START + b"a", MIB),  # a name that does not end
        (b"GET /", MIB),  # a target that does not end
    ],
)
async def test_a_header_block_without_an_end_is_refused(start, part):
    async with running_server(hello) as port, connected(port) as client:
        await client.send(start)
        await client.send(part, count=400)
        answer = await client.answer()
    assert client.num_sent < MAX_READ
    if answer:  # the reset may overtake it
        assert status_of(answer) == 431


@pytest.mark.parametrize("num_more", [1, 300_000])
async def test_a_complete_header_block_above_the_limit_is_refused(num_more):
    async with running_server(hello) as port, connected(port) as client:
        value = b"x" * (MAX_HEADER_BYTES + num_more)
        await client.send(START + b"a: " + value + b"\r\n\r\n")
        answer = await client.answer()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert (status_of(head), b"connection: close" in head.lower()) == (431, True)
    error = json.loads(body)["error"]
    assert error["message"] == f"the headers are too large (limit {MAX_HEADER_BYTES} bytes)"
    assert error["code"] == "headers_too_large"


@pytest.mark.parametrize(
    ("start", "part"),
    [
        (b"5\r\nhello\r\n0\r\na: ", MIB),  # a trailer
        (b"5\r\nhello\r\n0\r\n", b"a: b\r\n" * 2**15),  # trailers
        (b"5;a=", MIB),  # a chunk extension
    ],
)
async def test_the_parts_of_a_chunked_body_that_are_no_body_are_limited(start, part):
    async with running_server(hello) as port, connected(port) as client:
        await client.send(CHUNKED + start)
        await client.send(part, count=400)
        await client.answer()
    assert client.num_sent < MAX_READ


async def test_headers_within_the_limit_and_large_bodies_are_served():
    async with running_server(hello) as port, connected(port) as client:
        value = b"x" * (MAX_HEADER_BYTES - 100)
        request = START + b"a: " + value + b"\r\ncontent-length: 4194304\r\n\r\n" + MIB * 4
        for _ in range(3):  # the limit holds for each request, not for a connection
            await client.send(request)
        await client.send(START + b"connection: close\r\n\r\n")
        answer = await client.answer()
    assert answer.count(b"200 OK") == 4


async def test_small_chunks_are_not_counted_together():
    async with running_server(hello) as port, connected(port) as client:
        await client.send(CHUNKED.replace(b"chunked", b"chunked\r\nconnection: close"))
        await client.send(b"1\r\nx\r\n" * 1000, count=200)
        await client.send(b"0\r\n\r\n")
        assert status_of(await client.answer()) == 200


class Endless:
    """An application whose response does not end, and whether its client has left."""

    def __init__(self):
        self.has_ended = asyncio.Event()
        self.num_sent = 0

    async def __call__(self, scope, receive, send):
        sending = asyncio.create_task(self._send(send))
        while (await receive())["type"] != "http.disconnect":
            pass
        sending.cancel()
        self.has_ended.set()

    async def _send(self, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x" * 2**16, "more_body": True})
            self.num_sent += 1
            await asyncio.sleep(0)


async def test_a_client_that_does_not_read_is_disconnected(monkeypatch):
    monkeypatch.setattr(connection, "WRITE_TIMEOUT_S", 0.5)
    app = Endless()
    async with running_server(app) as port, connected(port) as client:
        await client.send(START + b"\r\n")
        await asyncio.wait_for(app.has_ended.wait(), 10)
        assert 0 < app.num_sent < 1000


async def test_a_client_that_reads_slowly_is_served(monkeypatch):
    """Each pause of the response has a separate time limit."""
    timers, pause = [], BoundedConnection.pause_writing

    def record(self):
        pause(self)
        timers.append(self._write_timer)

    monkeypatch.setattr(BoundedConnection, "pause_writing", record)
    app = Endless()
    async with running_server(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**16)
        writer.write(START + b"\r\n")
        for _ in range(15):
            await eventually(lambda: timers and not timers[-1].cancelled())
            await reader.readexactly(2**20)
        assert len(timers) > 5
        assert all(each.cancelled() for each in timers[:-1])
        assert not app.has_ended.is_set()
        writer.close()
        await app.has_ended.wait()


SLOW = [
    b"",
    b"\r\n",
    b"GET / HT",
    START + b"a: b\r\n",
    b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\nGET / HT",  # after a complete request
    b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n\r\n",
]


@pytest.mark.parametrize("sent", SLOW)
async def test_a_header_block_that_does_not_arrive_ends_the_connection(monkeypatch, sent):
    monkeypatch.setattr(connection, "HEADER_TIMEOUT_S", 0.5)
    async with running_server(hello, timeout_keep_alive=1) as port, connected(port) as client:
        await client.send(sent)
        answer = await client.answer(timeout_s=30)
    assert answer.count(b"200 OK") == (b"\r\n\r\n" in sent)


async def test_bytes_that_arrive_slowly_do_not_extend_the_time(monkeypatch):
    monkeypatch.setattr(connection, "HEADER_TIMEOUT_S", 0.5)
    async with running_server(hello) as port, connected(port) as client:
        answer = asyncio.ensure_future(client.answer())
        while not answer.done():
            await client.send(b"G" if client.num_sent == 0 else b"E")
            await asyncio.sleep(0.05)
    await answer  # raises TimeoutError if it took 10 s


async def test_a_slow_request_is_served_within_the_time():
    async with running_server(hello) as port, connected(port) as client:
        for byte in START + b"connection: close\r\n\r\n":
            await client.send(bytes([byte]))
        assert status_of(await client.answer()) == 200


async def test_waiting_connections_take_no_place_of_new_ones(monkeypatch):
    """Those that wait longest are closed; those with a request, here of a slow body, are not."""
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 50)
    async with running_server(until_asked) as port, AsyncExitStack() as stack:
        busy = [await stack.enter_async_context(connected(port)) for _ in range(5)]
        for client in busy:
            await client.send(START + b"connection: close\r\n\r\n")
        half = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\nx"
        for index in range(150):
            client = await stack.enter_async_context(connected(port))
            await client.send(half if index % 2 else b"GET / HT")
        for _ in range(10):
            async with connected(port) as client:
                await client.send(START.replace(b"/ HTTP", b"/now HTTP") + b"\r\n")
                async with asyncio.timeout(30):
                    assert status_of(await client.receive()) == 200
        RELEASED.set()
        assert [status_of(await client.answer()) for client in busy] == [200] * 5


RELEASED = asyncio.Event()


async def test_a_connection_that_is_reset_is_not_kept_by_its_timer():
    made = []

    class Recorded(BoundedConnection):
        def connection_made(self, transport):
            super().connection_made(transport)
            made.append(self)

    async with running_server(hello, http=Recorded) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(START + b"\r\n")
        assert b"hello" in await reader.readuntil(b"0\r\n\r\n")
        peer = writer.get_extra_info("socket")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        await eventually(lambda: made[0]._lost.done())
        assert made[0].timeout_keep_alive_task is None


async def until_asked(scope, receive, send):
    if scope["path"] != "/now":
        await RELEASED.wait()
    await hello(scope, receive, send)


class WrittenTransport:
    """A transport that records what is written."""

    def __init__(self):
        self.parts = []
        self.is_closed = False

    def write(self, data):
        self.parts.append(data)

    def close(self):
        self.is_closed = True

    def is_closing(self):
        return self.is_closed

    def get_protocol(self):
        return self

    def close_after(self, own):
        self.close()


async def test_a_head_is_written_with_the_first_body():
    transport = WrittenTransport()
    own = connection._ResponseTransport(transport, asyncio.get_running_loop())
    for part in (b"head ", b"first", b"second"):
        own.write(part)
    assert transport.parts == [b"head first", b"second"]
    await asyncio.sleep(0)
    assert transport.parts == [b"head first", b"second"]
    own.close()
    assert transport.is_closed


async def test_a_head_without_a_body_is_written_before_the_end():
    transport = WrittenTransport()
    own = connection._ResponseTransport(transport, asyncio.get_running_loop())
    own.write(b"head")
    own.close()
    assert (transport.parts, transport.is_closed) == ([b"head"], True)
    await asyncio.sleep(0)
    assert transport.parts == [b"head"]


async def test_a_head_does_not_wait_for_the_body():
    is_read = asyncio.Event()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await is_read.wait()
        await send({"type": "http.response.body", "body": b"hello"})

    async with running_server(app) as port, connected(port) as client:
        await client.send(START + b"connection: close\r\n\r\n")
        assert status_of(await asyncio.wait_for(client.receive(), 30)) == 200
        is_read.set()
        assert b"hello" in await client.answer()


async def test_responses_without_bodies_come_in_order():
    async with running_server(hello) as port, connected(port) as client:
        await client.send(START.replace(b"GET", b"HEAD") + b"\r\n", count=3)
        await client.send(START + b"connection: close\r\n\r\n")
        heads = (await client.answer()).split(b"HTTP/1.1 200 OK")
    assert [b"hello" in head for head in heads[1:]] == [False, False, False, True]


async def test_a_head_is_sent_before_the_connection_ends(monkeypatch):
    """The connection closes itself once a response is complete, such as in a shutdown."""
    connections, made = [], BoundedConnection.connection_made

    def connection_made(self, transport):
        connections.append(self)
        made(self, transport)

    async def app(scope, receive, send):
        await hello(scope, receive, send)
        connections[0].shutdown()

    monkeypatch.setattr(BoundedConnection, "connection_made", connection_made)
    async with running_server(app) as port, connected(port) as client:
        await client.send(START.replace(b"GET", b"HEAD") + b"\r\n")
        assert status_of(await client.answer()) == 200


async def test_a_client_that_waits_for_100_continue_gets_it():
    async with running_server(hello) as port, connected(port) as client:
        expecting = b"content-length: 1\r\nexpect: 100-continue\r\nconnection: close\r\n\r\n"
        await client.send(START.replace(b"GET", b"POST") + expecting)
        assert status_of(await asyncio.wait_for(client.receive(), 30)) == 100
        await client.send(b"x")
        assert b"hello" in await client.answer()


@pytest.mark.parametrize("num_bytes", [3, 300_000])  # the latter pauses reading
async def test_the_end_of_a_connection_reaches_its_request(num_bytes):
    has_body, ends = asyncio.Event(), []

    async def wait_for_end(scope, receive, send):
        while (await receive())["more_body"]:
            pass
        has_body.set()
        ends.append(await asyncio.wait_for(asyncio.shield(scope["state"][CONNECTION_LOST]), 10))

    async with running_server(wait_for_end) as port:
        async with connected(port) as client:
            head = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % num_bytes
            await client.send(head + b"x" * num_bytes)
            await has_body.wait()
        async with asyncio.timeout(10):
            while not ends:
                await asyncio.sleep(0.01)


async def test_requests_that_follow_wait_in_the_socket():
    """Not in memory, where no limit counts them."""
    may_end = asyncio.Event()

    async def wait(scope, receive, send):
        await may_end.wait()
        await hello(scope, receive, send)

    async with running_server(wait) as port, connected(port) as client:
        await client.send(START.replace(b"GET", b"POST") + b"content-length: 1\r\n\r\nx")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await client.send(START + b"a: " + b"x" * 60_000 + b"\r\n\r\n", count=2000)
        assert client.num_sent < MAX_READ
        may_end.set()
        assert status_of(await asyncio.wait_for(client.receive(), 30)) == 200
