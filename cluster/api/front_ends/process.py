"""The process of a front end: `python -m cluster.api.front_ends.process CHANNEL HTTP COUNTERS`.

The arguments are inherited descriptors: of the channel to the Router, of a socket that listens for
HTTP, and of the counters that all front ends share.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from contextlib import suppress
from typing import NoReturn

import uvloop

from cluster.api.app import make_app
from cluster.api.base.authentication import AdminAccess
from cluster.api.front_ends.messages import Start
from cluster.api.front_ends.relay import RelayedAdminServicer, RelayHttp, RelayOthers
from cluster.api.front_ends.router_client import FrontEndRouter, RouterClient
from cluster.api.front_ends.shared_counters import SharedCounters
from cluster.api.grpc.servicers import InferenceServicer
from cluster.api.http.bodies import LimitBodies
from cluster.api.http.hosts import CheckHost
from cluster.api.http.limits import HttpLimits
from cluster.api.ingress import EmbeddedIngress
from cluster.observability import logs

_COUNTS_PERIOD_S = 1.0
_DRAIN_PERIOD_S = 0.05
_END_S = 2.0
"""How long the last answers may take once the Router has ended all streams."""


async def serve(channel: socket.socket, http_socket: socket.socket, counters: int) -> None:
    """Serve until the Router ends this front end."""
    client = RouterClient(channel, _end_at_once)
    start = await client.started
    logs.configure(start.routed.config.logs)
    shared = SharedCounters(counters, start.num_rows, len(start.keys))
    router = FrontEndRouter(start, client, lambda: shared.num_sequences)
    ingress = _ingress(start, shared, router, client)
    await asyncio.to_thread(lambda: router.text.tokenizer)
    await ingress.start(http_socket)
    client.send("listening")
    reporting = asyncio.create_task(_report(router, client, ingress))
    await client.stopped.wait()
    with suppress(TimeoutError):
        async with asyncio.timeout(_END_S):
            while router.num_streams:
                await asyncio.sleep(0.01)
    reporting.cancel()
    await ingress.close()
    client.send("counts", router.metrics.counts, 0)
    await asyncio.to_thread(router.close)
    client.close()


def _ingress(
    start: Start, shared: SharedCounters, router: FrontEndRouter, client: RouterClient
) -> EmbeddedIngress:
    config = start.routed.config
    keys, budget = shared.limits(start.row, start.keys, config)
    access = AdminAccess(start.admin_token, keys)
    limits = HttpLimits.of(config, has_keys=not keys.is_open, budget=budget)
    own = make_app(lambda: router, _no_operators, lambda: keys, lambda: limits, has_peers=False)
    relay = CheckHost(LimitBodies(RelayHttp(client), lambda: limits), lambda: limits.hosts)
    return EmbeddedIngress(
        RelayOthers(own, relay),
        InferenceServicer(router, keys, budget=budget),
        RelayedAdminServicer(client),
        access,
        config,
        shares_ports=True,
    )


def _end_at_once() -> None:
    """End without the Router: no stream can continue, and its successor needs the ports."""
    os._exit(os.EX_UNAVAILABLE)


def _no_operators() -> NoReturn:
    raise AssertionError("a path of operators was not relayed")


async def _report(router: FrontEndRouter, client: RouterClient, ingress: EmbeddedIngress) -> None:
    """Send the counts every second, and follow the state of the Router."""
    is_ready = False
    while True:
        if is_ready != (not client.state.why_not_ready):
            is_ready = not is_ready
            await ingress.set_ready(is_ready)
        client.send("counts", router.metrics.counts, router.num_streams)
        period_s = _DRAIN_PERIOD_S if client.state.is_draining else _COUNTS_PERIOD_S
        with suppress(TimeoutError):
            await asyncio.wait_for(client.changed.wait(), period_s)
        client.changed.clear()


def main(channel: int, http: int, counters: int) -> None:
    """Run a front end on inherited descriptors."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(socket.socket(fileno=channel), socket.socket(fileno=http), counters))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
