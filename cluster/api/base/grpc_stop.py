"""Stops gRPC servers in bounded time."""

from __future__ import annotations

import asyncio

import grpc

_CLOSE_S = 1.0
"""How long the connections of calls that have ended may take to close."""


async def stop_server(server: grpc.aio.Server, grace_s: float) -> None:
    """Stop accepting calls, and end the open ones after `grace_s`.

    grpc.aio then waits for every connection. One whose client does not read lasts 17 s more, or
    ends with the process.
    """
    stopping = asyncio.ensure_future(server.stop(grace_s))
    done, _ = await asyncio.wait([stopping], timeout=grace_s + _CLOSE_S)
    for each in done:
        each.result()
