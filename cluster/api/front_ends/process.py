"""The process of a front end, and the one that forks it.

`python -m cluster.api.front_ends.process CONTROL COUNTERS` imports all modules, loads the tokenizer
and forks a front end for each order of the Router; see `fork_server`. So front ends share this
memory, and start in milliseconds. Before a fork there is no thread, no event loop and no gRPC
server. The arguments are inherited descriptors: of the socket for orders, and of the counters that
all front ends share.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import pickle
import socket
import sys
from contextlib import suppress
from typing import NamedTuple, NoReturn

import uvloop

from cluster.api.base.authentication import AdminAccess
from cluster.api.front_ends.fork_server import FORK, MAX_PACKET_BYTES, WAIT
from cluster.api.front_ends.messages import Start
from cluster.api.front_ends.relay import RelayedAdminServicer, RelayHttp, RelayOthers
from cluster.api.front_ends.router_client import FrontEndRouter, RouterClient
from cluster.api.front_ends.shared_counters import SharedCounters
from cluster.api.grpc.servicers import InferenceServicer
from cluster.api.http.bodies import LimitBodies
from cluster.api.http.limits import HttpLimits
from cluster.api.http.origin import CheckHost
from cluster.api.http_app import make_app
from cluster.api.ingress import EmbeddedIngress
from cluster.observability import logs
from cluster.workers.rank.heap import freeze_heap
from specdec.text.tokenizer import Tokenizer

_COUNTS_PERIOD_S = 1.0
_DRAIN_PERIOD_S = 0.05
_END_S = 2.0
"""How long the last answers may take once the Router has ended all streams."""


async def serve(
    channel: socket.socket, http_socket: socket.socket, counters: int, tokenizer: Tokenizer
) -> None:
    """Serve until the Router ends this front end."""
    client = RouterClient(channel, _end_at_once)
    start = await client.started
    logs.configure(start.routed.config.logs)
    shared = SharedCounters(counters, start.num_rows, len(start.keys))
    router = FrontEndRouter(start, client, lambda: shared.num_sequences)
    router.text.tokenizer = tokenizer
    ingress = _ingress(start, shared, router, client)
    await ingress.start(http_socket)
    client.send("listening")
    reporting = asyncio.create_task(_report(router, client, ingress))
    await client.stopped.wait()
    await router.auditor.close()
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
    limited = LimitBodies(RelayHttp(client, access, keys), lambda: limits)
    relay = CheckHost(limited, lambda: limits.hosts)
    return EmbeddedIngress(
        RelayOthers(own, relay),
        InferenceServicer(router, keys, budget=budget),
        RelayedAdminServicer(client),
        access,
        config,
        shares_ports=True,
        on_failure=_end_at_once,
    )


def _end_at_once() -> None:
    """End without the Router or a server: its successor needs the ports."""
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


class FrontEnd(NamedTuple):
    """A front end that has just been forked: its descriptors, and its tokenizer."""

    channel: int
    http: int
    tokenizer: Tokenizer


def fork_front_ends(orders: socket.socket) -> FrontEnd | None:
    """Execute orders. Return in each forked process; None once the Router has ended."""
    tokenizer: Tokenizer | None = None
    while True:
        order, descriptors, *_ = socket.recv_fds(orders, MAX_PACKET_BYTES, 3)
        if not order:
            return None
        kind, *pid = order.decode().split()
        if kind == FORK and len(descriptors) == 3:
            channel, http, memory = descriptors
            tokenizer = tokenizer or _loaded(memory)
            if _is_forked(orders):
                os.close(memory)
                return FrontEnd(channel, http, tokenizer)
        elif kind == WAIT:
            orders.send(_exit_status(int(pid[0])).encode())
        else:
            orders.send(b"descriptors were lost: there are too many open files")
        for each in descriptors:
            os.close(each)


def _loaded(memory: int) -> Tokenizer:
    """Read the tokenizer, the last of what front ends share."""
    with mmap.mmap(memory, 0, access=mmap.ACCESS_READ) as content:
        tokenizer: Tokenizer = pickle.loads(content)  # noqa: S301  # of our own Router
    freeze_heap()
    return tokenizer


def _is_forked(orders: socket.socket) -> bool:
    """Fork a front end; return whether this is its process, else answer the order."""
    try:
        pid = os.fork()
        if pid == 0:
            orders.close()
            return True
        process = os.pidfd_open(pid)
    except OSError as error:
        orders.send(str(error).encode())
        return False
    socket.send_fds(orders, [str(pid).encode()], [process])
    os.close(process)
    return False


def _exit_status(pid: int) -> str:
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:
        return "unknown, of an earlier process"
    return str(os.waitstatus_to_exitcode(status))


def main(orders: int, counters: int) -> None:
    """Fork front ends, and run each in its process."""
    front_end = fork_front_ends(socket.socket(fileno=orders))
    if front_end is None:
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        channel, http = (socket.socket(fileno=each) for each in front_end[:2])
        runner.run(serve(channel, http, counters, front_end.tokenizer))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
