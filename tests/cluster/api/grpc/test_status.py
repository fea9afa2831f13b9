"""Malformed requests, on a server of grpc and on one of Ray Serve."""

import asyncio
import socket
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from unittest.mock import Mock

import grpc
import pytest
from grpc_health.v1 import health
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from ray.serve._private.grpc_util import gRPCGenericServer

from cluster.api.grpc import status
from cluster.api.grpc.servicers import add_inference_service
from cluster.api.grpc.status import MALFORMED_MESSAGE, GenericServer
from cluster.api.serve_proxy.grpc import restate_answers
from protos.specdec.v1 import inference_pb2 as pb
from protos.specdec.v1.inference_pb2_grpc import InferenceServiceServicer

GENERATE = "/specdec.v1.InferenceService/Generate"
STREAM = "/specdec.v1.InferenceService/GenerateStream"


class Answering(InferenceServiceServicer):
    async def Generate(self, request, context):  # noqa: N802
        return pb.GenerateResponse(request_id=request.text)

    async def GenerateStream(self, request, context):  # noqa: N802
        async for text in texts(request):
            yield pb.GenerateStreamResponse(request_id=text)


ENDLESS = pb.GenerateRequest(text="ENDLESS").SerializeToString()
ENDED = []
"""The endless streams that were closed."""


async def texts(request):
    """Yield the text of a request; indefinitely, as large texts, if it is ENDLESS."""
    try:
        yield request.text
        while request.text == "ENDLESS":
            yield "x" * 100_000
    finally:
        ENDED.append(request.text)


class Proxy:
    """Proxy as Serve's, with a handler for each method and no application."""

    proxy_router = SimpleNamespace(endpoints={})

    def service_handler_factory(self, service_method, streaming_type):
        async def call(request, context):
            return pb.GenerateResponse(request_id=request.text).SerializeToString()

        async def stream(request, context):
            async for text in texts(request):
                yield pb.GenerateResponse(request_id=text).SerializeToString()

        return stream if service_method == STREAM else call


def serve_server():
    server = gRPCGenericServer(Proxy().service_handler_factory)
    restate_answers(None, server)
    return server


@pytest.fixture(params=[grpc.aio.server, serve_server], ids=["ours", "serve"])
async def channel(request):
    server = request.param()
    add_inference_service(Answering(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


async def call(channel, method, content):
    if method == GENERATE:
        return await channel.unary_unary(method)(content, timeout=10)
    [answer] = [each async for each in channel.unary_stream(method)(content, timeout=10)]
    return answer


@pytest.mark.parametrize("method", [GENERATE, STREAM])
async def test_malformed_requests_are_invalid_arguments(channel, method):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, method, b"\xff")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == MALFORMED_MESSAGE
    answer = await call(channel, method, pb.GenerateRequest(text="hello").SerializeToString())
    assert pb.GenerateResponse.FromString(answer).request_id == "hello"


async def test_a_stream_that_its_client_does_not_read_ends(channel, monkeypatch):
    ENDED.clear()
    ended, report = asyncio.Event(), status.reporting_to
    monkeypatch.setattr(status, "reporting_to", lambda context: ended.set() or report(context))
    stream = channel.unary_stream(STREAM)(ENDLESS)
    await stream.read()
    monkeypatch.setattr(status, "WRITE_TIMEOUT_S", 0.5)
    async with asyncio.timeout(20):
        while not ENDED:  # grpc buffers megabytes for the client
            await asyncio.sleep(0.05)
        await ended.wait()  # without the client, so that the call leaves its place
        with pytest.raises(grpc.aio.AioRpcError, match=r"not read its stream for 0\.5 s") as caught:
            await read_all(stream)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(caught.value.trailing_metadata())["retry-after-s"] == "1"


async def test_a_first_write_at_its_limit_closes_the_handler_and_is_not_cancelled(monkeypatch):
    """grpc.aio would send the headers again with the status."""
    monkeypatch.setattr(status, "WRITE_TIMEOUT_S", 0.0)
    closed = asyncio.Event()

    async def handler(request, context):
        try:
            yield request
            pytest.fail("the handler goes on")
        finally:
            closed.set()

    is_read = asyncio.Event()
    context = Mock(write=lambda _message: is_read.wait())
    sending = asyncio.ensure_future(status.refuse_malformed(handler)("text", context))
    await closed.wait()
    assert not context.set_code.called
    is_read.set()
    await sending
    context.set_code.assert_called_once_with(grpc.StatusCode.RESOURCE_EXHAUSTED)


class StallingProxy:
    """TCP proxy that passes answers on while `is_open` is set, with small buffers."""

    def __init__(self, port):
        self.port, self.is_open = port, asyncio.Event()
        self.is_open.set()

    async def connect(self, reader, writer):
        ours = socket.socket()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        ours.setblocking(False)
        await asyncio.get_running_loop().sock_connect(ours, ("127.0.0.1", self.port))
        answers, requests = await asyncio.open_connection(sock=ours, limit=4096)
        with suppress(asyncio.CancelledError, OSError):
            await asyncio.gather(
                self.copy(reader, requests), self.copy(answers, writer, self.is_open)
            )
        requests.close()
        writer.close()

    async def copy(self, reader, writer, is_open=None):
        while True:
            if is_open is not None:
                await is_open.wait()
            if not (data := await reader.read(65536)):
                return
            writer.write(data)
            await writer.drain()


@asynccontextmanager
async def stalling_channel():
    """Start a server; yield it, the proxy before it, and a channel to the proxy."""
    server = grpc.aio.server()
    add_inference_service(Answering(), server)
    proxy = StallingProxy(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    listener = await asyncio.start_server(proxy.connect, "127.0.0.1", 0)
    address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    options = [("grpc.http2.lookahead_bytes", 64 << 20)]  # gRPC's own window is full later
    async with asyncio.timeout(60), grpc.aio.insecure_channel(address, options) as channel:
        yield server, proxy, channel
    listener.close()


async def test_a_stream_whose_headers_are_not_read_in_time_ends_with_the_status(monkeypatch):
    async with stalling_channel() as (server, proxy, channel):
        endless = channel.unary_stream(STREAM)(ENDLESS)
        await endless.read()
        reading = asyncio.ensure_future(read_all(endless))
        proxy.is_open.clear()
        monkeypatch.setattr(status, "WRITE_TIMEOUT_S", 0.5)
        ENDED.clear()
        while not ENDED:  # the connection is full
            await asyncio.sleep(0.05)
        short = channel.unary_stream(STREAM)(pb.GenerateRequest(text="s").SerializeToString())
        while "s" not in ENDED:
            await asyncio.sleep(0.05)
        proxy.is_open.set()
        for stream in (reading, read_all(short)):
            with pytest.raises(grpc.aio.AioRpcError, match="not read its stream for"):
                await stream
    await server.stop(0)


def test_no_method_is_registered():
    """Otherwise grpc.aio waits for a call of each of them, again after every call."""
    added = []
    server = SimpleNamespace(add_generic_rpc_handlers=added.extend)  # and no other method
    add_inference_service(Answering(), server)
    add_HealthServicer_to_server(health.aio.HealthServicer(), GenericServer(server))
    assert [each.service_name() for each in added] == [
        "specdec.v1.InferenceService",
        "grpc.health.v1.Health",
    ]


async def read_all(stream):
    while await stream.read() is not grpc.aio.EOF:
        pass


async def test_each_message_of_a_stream_has_the_whole_time_to_be_read(channel, monkeypatch):
    """So a stream that is read slowly goes on."""
    call_later = Mock(wraps=asyncio.get_running_loop().call_later)
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", call_later)
    ENDED.clear()
    stream = channel.unary_stream(STREAM)(ENDLESS)
    for _ in range(300):
        assert await stream.read() is not grpc.aio.EOF
    limits = [each.args[0] for each in call_later.call_args_list]
    assert limits.count(status.WRITE_TIMEOUT_S) >= 300
    assert ENDED == []
    stream.cancel()
