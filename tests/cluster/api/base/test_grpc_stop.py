"""The end of a gRPC server, whatever its clients do."""

import asyncio

import grpc

from cluster.api.base import grpc_stop
from cluster.api.base.grpc_stop import stop_server
from cluster.api.grpc import status
from tests.cluster.api.grpc.test_status import (
    ENDED,
    ENDLESS,
    STREAM,
    read_all,
    stalling_channel,
)
from tests.waiting import eventually


async def test_a_connection_that_is_not_read_delays_no_stop(monkeypatch):
    """grpc.aio itself waits until gRPC closes it, after 17 s."""
    monkeypatch.setattr(grpc_stop, "_CLOSE_S", 0.2)
    async with stalling_channel() as (server, proxy, channel):
        stream = channel.unary_stream(STREAM)(ENDLESS)
        await stream.read()
        proxy.is_open.clear()
        reading = asyncio.ensure_future(read_all(stream))
        monkeypatch.setattr(status, "WRITE_TIMEOUT_S", 0.5)
        ENDED.clear()
        await eventually(lambda: ENDED)  # the connection is full
        await stop_server(server, 0)
        assert await server.wait_for_termination(0.0), "the connection is open"
        proxy.is_open.set()
        await asyncio.gather(reading, return_exceptions=True)
        await server.wait_for_termination()


async def test_a_server_without_calls_stops_at_once(monkeypatch):
    monkeypatch.setattr(grpc_stop, "_CLOSE_S", 1e6)
    server = grpc.aio.server()
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await asyncio.wait_for(stop_server(server, 0), 60)
