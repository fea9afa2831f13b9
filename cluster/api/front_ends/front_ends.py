"""Starts the front ends of a Router, replaces those that end, and stops them."""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

from cluster.api.base.authentication import ApiKey
from cluster.api.front_ends.fork_server import ForkedProcess, ForkServer
from cluster.api.front_ends.messages import RouterState, Start
from cluster.api.front_ends.router_end import Method, RouterEnd
from cluster.api.front_ends.shared_counters import SharedCounters
from cluster.api.ingress import open_with_retries
from cluster.config.network import listening_socket, takes_ipv4_too
from cluster.config.serve_config import ServeConfig
from cluster.replica.orders import AbortOrder
from cluster.replica.replica_router import ReplicaRouter
from specdec.types.errors import NotReadyError, SpecdecError

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_RESTART_S = 1.0
"""Between the starts of a front end: one that ends at once must not take all CPU time."""
_STOP_S = 10.0
_START_TIMEOUT_S = 120.0
_FROZEN_S = 60.0
"""A front end that has sent nothing for this long, not even its counts, is killed; it sends none
while it starts."""


class FrontEnds:
    """The front ends of a Router, in place of an EmbeddedIngress."""

    def __init__(
        self,
        router: ReplicaRouter,
        methods: Mapping[str, Method],
        config: ServeConfig,
        counters: SharedCounters,
        keys: tuple[ApiKey, ...] = (),
        admin_token: str | None = None,
    ) -> None:
        """methods: see RouterEnd. counters: with a row for each front end, and one for the Router.

        keys, admin_token: see Start.
        """
        count = self._count = counters.num_rows - 1
        self._counters = counters
        self._keys, self._admin_token = keys, admin_token
        self._is_ready = False
        self._router = router
        self._methods = methods
        self._config = config
        self._http_sockets: list[socket.socket] = []
        self._reserved: socket.socket | None = None  # the port of gRPC
        self._ends: dict[int, RouterEnd] = {}  # by row, as the processes
        self._processes: dict[int, ForkedProcess] = {}
        self._server = ForkServer(
            counters.descriptor,
            lambda: pickle.dumps(router.text.tokenizer, pickle.HIGHEST_PROTOCOL),
        )
        self._keepers: list[asyncio.Task[None]] = []
        self._follower: asyncio.Task[None] | None = None
        self._have_started = [asyncio.Event() for _ in range(count)]  # by row, once
        self._num_started = 0
        self._is_stopping = False

    async def start(self) -> None:
        """Open both ports and start the front ends, without waiting for them. Raises OSError."""
        host, config = self._config.host, self._config
        reserve_http = partial(reserve, host, config.http_port, self._count)
        self._http_sockets = await open_with_retries(reserve_http)
        [self._reserved] = await open_with_retries(partial(reserve, host, config.grpc_port, 1))
        for each in self._http_sockets:
            each.listen(2048)
        self._keepers = [asyncio.create_task(self._keep(row)) for row in range(self._count)]
        self._follower = asyncio.create_task(self._follow())

    async def set_ready(self, is_ready: bool) -> None:
        """Show the state of the Router to the front ends; wait for their start if it is ready.

        Raises TimeoutError.
        """
        self._is_ready = is_ready
        self._show()
        if is_ready:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await asyncio.gather(*(each.wait() for each in self._have_started))

    def abort(self, order: AbortOrder) -> None:
        """End the requests that an order applies to."""
        for each in self._ends.values():
            each.abort(order)

    async def close(self) -> None:
        """Have all front ends end, and wait for it."""
        self._is_stopping = True
        for each in self._ends.values():
            each.stop()
        if self._keepers:
            _, late = await asyncio.wait(self._keepers, timeout=_STOP_S)
            if late:
                self._server.kill()
                for process in self._processes.values():
                    process.kill()
            await asyncio.gather(*self._keepers, return_exceptions=True)
        if self._follower is not None:
            self._follower.cancel()
        await self._server.close()
        for listener in (*self._http_sockets, self._reserved):
            if listener is not None:
                listener.close()
        self._counters.close()

    async def all_close_within(self, timeout_s: float) -> bool:
        """Wait until no stream of a front end is open; return False if some still are."""
        ends_at_s = time.monotonic() + timeout_s
        while any(each.num_streams != 0 for each in self._ends.values()):
            if time.monotonic() > ends_at_s:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    async def _keep(self, row: int) -> None:
        """Run a front end, and another one whenever it ends."""
        while not self._is_stopping:
            try:
                reason = await self._run(row)
            except (OSError, SpecdecError) as error:
                reason = f"it did not start: {error}"
            if not self._is_stopping:
                logger.warning("front end %d: %s", row, reason)
                await asyncio.sleep(_RESTART_S)

    async def _run(self, row: int) -> str:
        """Run a front end until it ends, and return how it did. Raises OSError, SpecdecError."""
        own, other = socket.socketpair()
        with own:
            with other:
                http = self._http_sockets[row].fileno()
                process = await self._server.fork(other.fileno(), http)
            self._processes[row] = process
            if not self._is_stopping:  # otherwise it ends, as its channel is closed
                await self._serve(row, own)
        status = await self._server.ended(process)
        del self._processes[row]
        self._counters.clear(row)
        return f"process {process.pid} has ended: {status}"

    async def _serve(self, row: int, own: socket.socket) -> None:
        """Answer a front end until it is lost."""
        lost = asyncio.Event()
        self._ends[row] = RouterEnd(
            own,
            self._router,
            self._methods,
            self._start(row),
            on_listening=self._have_started[row].set,
            on_lost=lost.set,
            on_result=self._show,
        )
        self._show()
        await lost.wait()
        del self._ends[row]

    def _start(self, row: int) -> Start:
        self._num_started += 1
        return Start(
            self._router.routed,
            f"{self._num_started}.",
            self._keys,
            self._admin_token,
            row,
            self._counters.num_rows,
        )

    async def _follow(self) -> None:
        """Show each change of the Router's state soon, and replace processes as they fail."""
        while True:
            self._show()
            self._server.restart_if_ended()
            with suppress(NotReadyError):
                thread = self._router.running_engine().thread
                self._counters.num_sequences = thread.num_sequences
            for row, end in self._ends.items():
                if end.silence_s > _FROZEN_S:
                    self._processes[row].kill()
            await asyncio.sleep(_POLL_S)

    def _show(self) -> None:
        state = state_of(self._router)
        if not (self._is_ready or state.why_not_ready):
            state = replace(state, why_not_ready="it is not ready")
        for each in self._ends.values():
            each.show(state)


def state_of(router: ReplicaRouter) -> RouterState:
    """Return the state that front ends go by."""
    try:
        thread = router.running_engine().thread
    except NotReadyError:
        return RouterState()
    return RouterState(
        router.why_not_ready,
        has_engine=True,
        is_draining=thread.is_draining,
        failure=router.failure,
        adapter_ids=router.adapter_ids,
    )


def reserve(host: str, port: int, count: int) -> list[socket.socket]:
    """Return sockets that are bound to a port which no other service has. Raises OSError."""
    with listening_socket(host, port) as first:  # raises if it is in use
        family = first.family
    found = []
    for _ in range(count):
        each = socket.socket(family)
        if family == socket.AF_INET6:
            each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not takes_ipv4_too(host))
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        each.bind((host, port))
        found.append(each)
    return found
