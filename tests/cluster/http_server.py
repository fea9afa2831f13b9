"""An ASGI application on a real server, and a client that controls every byte it sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import uvicorn

from cluster.api.http.connection import BoundedConnection


@asynccontextmanager
async def running_server(app: Any, **options: Any) -> AsyncIterator[int]:
    """Serve on the embedded ingress's kind of connection; yield the port."""
    options = {"http": BoundedConnection, "port": 0, "timeout_graceful_shutdown": 1} | options
    config = uvicorn.Config(app, log_config=None, lifespan="off", **options)
    server = uvicorn.Server(config)
    server.capture_signals = suppress  # type: ignore[method-assign,assignment]
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await running


class RawClient:
    """One connection, over which a request is sent in parts."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.num_sent = 0

    async def send(self, data: bytes, count: int = 1) -> None:
        """Send data a number of times, until the server closes the connection."""
        with suppress(ConnectionError):
            for _ in range(count):
                self._writer.write(data)
                await self._writer.drain()
                self.num_sent += len(data)

    async def answer(self, timeout_s: float = 10.0) -> bytes:
        """Return all that the server sends until it closes the connection."""
        parts = []
        with suppress(ConnectionError):
            while part := await asyncio.wait_for(self._reader.read(2**16), timeout_s):
                parts.append(part)
        return b"".join(parts)

    async def until_refused(self, timeout_s: float = 5.0) -> None:
        """Send chunks until the server has closed the connection for what it receives, too."""
        num_sent = -1
        async with asyncio.timeout(timeout_s):
            while num_sent < self.num_sent:
                num_sent = self.num_sent
                await self.send(b"1\r\nx\r\n")
                await asyncio.sleep(0.01)

    async def receive(self) -> bytes:
        """Return what the server sends next."""
        return await self._reader.read(2**16)

    async def close(self) -> None:
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[RawClient]:
    client = RawClient(*await asyncio.open_connection("127.0.0.1", port))
    try:
        yield client
    finally:
        await client.close()
