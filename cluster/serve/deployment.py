"""The Router as a Ray Serve deployment: one replica."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing, suppress
from functools import cached_property, partial
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.util.placement_group import PlacementGroup

from cluster.api.base.authentication import (
    AdminAccess,
    ApiKey,
    ApiKeys,
    access_summary,
    read_keys,
    read_token,
    samples_warning,
)
from cluster.api.base.byte_budget import ByteBudget
from cluster.api.base.operator_service import OperatorService
from cluster.api.front_ends.front_ends import FrontEnds
from cluster.api.front_ends.relay import GRPC, HTTP
from cluster.api.front_ends.router_end import Method
from cluster.api.front_ends.shared_counters import SharedCounters
from cluster.api.grpc import forwarding
from cluster.api.grpc.forwarding import ForwardedCall
from cluster.api.grpc.servicers import AdminServicer, InferenceServicer, expose_rpcs
from cluster.api.grpc.status import hide_reported_statuses
from cluster.api.http import forwarding as http_forwarding
from cluster.api.http.forwarding import ForwardedRequest, ResponseHead
from cluster.api.http.limits import HttpLimits
from cluster.api.http_app import make_app
from cluster.api.ingress import EmbeddedIngress, IngressFailedError
from cluster.config.serve_config import ServeConfig
from cluster.control.client import ControlClient, StatsStreams
from cluster.control.peers import Applications, ServeDirectory
from cluster.observability import logs
from cluster.replica.orders import AbortOrder
from cluster.replica.replica_router import ReplicaRouter
from cluster.serve.autoscaling import LOAD, NEEDED
from cluster.serve.broadcast import Broadcast, BroadcastReceiver
from cluster.serve.request_router import KV_CACHE_TOKENS
from cluster.serve.router_factory import make_router
from cluster.serve.start_errors import refusing_repeatable
from cluster.workers.rank.heap import freeze_heap
from cluster.workers.ray.ray_internals import is_replica_stopping
from cluster.workers.ray.resources import LocatedModels
from cluster.workers.shared_draft.pool_seats import PoolSeats
from specdec.types.errors import TargetFailedError
from specdec.types.responses import ModelInfo

logger = logging.getLogger(__name__)

_STOP_POLL_S = 0.2
_STALE_ROUTES_S = 1.0
"""Time in which Serve's proxies may still send requests to a replica that it stops."""


class RouterReplica(BroadcastReceiver):
    """One replica. Its constructor returns when the model is warm, so Serve routes to it then.

    operators: what operators can read and change. Serve calls RPCs, which are methods of servicers,
    by their names on this object.
    """

    _is_complete = False  # whether every attribute is set

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: Mapping[str, Any],
        control_plane: Any,
        located: LocatedModels | None,
        draft_pool: Any,
    ) -> None:
        serve_config = ServeConfig.from_mapping(config)
        logs.configure(serve_config.logs)
        hide_reported_statuses()
        context = serve.get_replica_context()
        self._application, self._replica_id = context.app_name, context.replica_id.unique_id
        self._has_failed = False
        placement = ray.util.get_current_placement_group()
        with refusing_repeatable(located):
            self.router = await asyncio.to_thread(
                make_router,
                serve_config,
                placement,
                self._application,
                self._replica_id,
                located,
                None if draft_pool is None else PoolSeats(draft_pool),
            )
        known = read_keys("api_key_file", serve_config.api_key_file)
        self.keys, budget = self._limits(serve_config, known)
        has_keys = not self.keys.is_open
        self.http_limits = HttpLimits.of(serve_config, has_keys=has_keys, budget=budget)
        token = read_token("admin_token_file", serve_config.admin_token_file)
        self.operators = self._operator_service(serve_config, control_plane, token)
        if located is None:  # otherwise the command reports it
            _log_access(serve_config, self.operators.access, has_keys=has_keys)
        applications = self.operators.applications
        expose_rpcs(InferenceServicer(self.router, self.keys, applications, budget), self)
        admin = AdminServicer(self.operators, budget)
        expose_rpcs(admin, self)
        self._ingress = self._embedded_ingress(serve_config, admin, known, token)
        await self._start(placement, located)

    def _limits(self, config: ServeConfig, keys: tuple[ApiKey, ...]) -> tuple[ApiKeys, ByteBudget]:
        """Return the limits of this process, which front ends share."""
        self._counters: SharedCounters | None = None
        if count := config.num_front_ends:  # with a row for what they relay to this process
            self._counters = SharedCounters.create(count + 1, len(keys))
            return self._counters.limits(count, keys, config)
        budget = ByteBudget(config.max_inflight_mib * 2**20)
        return ApiKeys(keys, min_priority=config.min_priority), budget

    async def _start(self, placement: PlacementGroup | None, located: LocatedModels | None) -> None:
        """Serve: alive at once, and ready once the models are warm."""
        self._calls_have_ended = asyncio.Event()
        self._stopping = asyncio.create_task(self._shut_down_when_stopped())
        self._is_complete = True
        self.operators.control.start()
        if self._ingress is not None:
            await self._ingress.start()
        with refusing_repeatable(located):
            await self.router.start(placement)
        freeze_heap()
        if self._ingress is not None:
            await self._ingress.set_ready(True)

    def _operator_service(
        self, config: ServeConfig, control_plane: Any, token: str | None
    ) -> OperatorService:
        router = self.router
        control = ControlClient(control_plane, router.apply_speculation, router.report)
        return OperatorService(
            control,
            AdminAccess(token, self.keys),
            StatsStreams(control.fleet),
            Broadcast(self._application, self._replica_id, router).orders,
            self._applications(config, router),
        )

    def _embedded_ingress(
        self,
        config: ServeConfig,
        admin: AdminServicer,
        keys: tuple[ApiKey, ...],
        token: str | None,
    ) -> EmbeddedIngress | FrontEnds | None:
        """Return our own servers; None where Serve's ingress receives the calls."""
        if config.ingress != "embedded":
            return None
        app = self._make_app(has_peers=False)
        if self._counters is not None:
            methods: Mapping[str, Method] = {
                HTTP: partial(http_forwarding.answer, app),
                GRPC: partial(forwarding.answer, admin),
            }
            return FrontEnds(self.router, methods, config, self._counters, keys, token)
        inference = InferenceServicer(self.router, self.keys, budget=admin.budget)
        return EmbeddedIngress(app, inference, admin, self.operators.access, config)

    def _make_app(self, *, has_peers: bool) -> FastAPI:
        return make_app(
            lambda: self.router,
            lambda: self.operators,
            lambda: self.keys,
            lambda: self.http_limits,
            has_peers=has_peers,
        )

    def _applications(self, config: ServeConfig, router: ReplicaRouter) -> Applications:
        """Return the other applications, which only Serve's ingress can forward to."""
        is_embedded = config.ingress == "embedded"
        list_peers = None if is_embedded else ServeDirectory(self._application).list_peers
        return Applications(config.served_model_name, list_peers, lambda: router.adapter_ids)

    async def own_model_infos(self) -> tuple[ModelInfo, ...]:
        """Return the descriptions of this model and its adapters; called by other applications."""
        return self.router.model_infos()

    async def answer_call(self, call: ForwardedCall) -> AsyncGenerator[Any, None]:
        """Serve a gRPC call that another application forwarded."""
        async with aclosing(forwarding.answer(self, call)) as messages:
            async for each in messages:
                yield each

    async def answer_request(
        self, request: ForwardedRequest
    ) -> AsyncGenerator[ResponseHead | bytes, None]:
        """Serve an HTTP request that another application forwarded."""
        async with aclosing(http_forwarding.answer(self._own_app, request)) as messages:
            async for each in messages:
                yield each

    @cached_property
    def _own_app(self) -> FastAPI:
        return self._make_app(has_peers=True)

    async def check_health(self) -> None:
        """Raise once the target or a server has failed, so that Serve replaces the replica."""
        try:
            await self.router.check_models()
            if isinstance(self._ingress, EmbeddedIngress):
                self._ingress.check()
        except (TargetFailedError, IngressFailedError):
            self._has_failed = True
            raise
        finally:
            if self._ingress is not None:
                await self._ingress.set_ready(self.router.is_ready)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load for cluster.serve.autoscaling; Serve calls this every few seconds."""
        needed = self.operators.control.replicas_needed
        known = {} if needed is None else {NEEDED: float(needed)}
        return {LOAD: self.router.load_in_requests(), **known}

    async def record_routing_stats(self) -> dict[str, int]:
        """Return what request routers learn of this replica; Serve calls this every 10 s."""
        return {KV_CACHE_TOKENS: self.router.kv_cache_tokens}

    async def abort_own_requests(self, order: AbortOrder) -> None:
        """See BroadcastReceiver; also of the front ends."""
        await super().abort_own_requests(order)
        if isinstance(self._ingress, FrontEnds):
            self._ingress.abort(order)

    async def drain(self, timeout_s: float | None = None) -> None:
        """Become not ready, and wait until all requests have ended or the timeout.

        timeout_s: None for drain_timeout_s; 0 aborts all requests, also of a running drain.
        """
        self.operators.stats_streams.drain()
        if self._ingress is not None:
            await self._ingress.set_ready(False)
        limit_s = self.router.config.drain_timeout_s if timeout_s is None else timeout_s
        ends_at_s = time.monotonic() + limit_s
        await self.router.drain(limit_s)
        if isinstance(self._ingress, FrontEnds):  # whose clients may be late, or ask for more
            await self._ingress.all_close_within(ends_at_s - time.monotonic())

    async def __del__(self) -> None:
        """Shut down; Serve calls this when the replica stops and its own calls have ended.

        It does so even before the constructor has returned, as when a start is interrupted.
        """
        if self._is_complete:
            self._calls_have_ended.set()
            await self._stopping

    async def _shut_down_when_stopped(self) -> None:
        """Drain and shut down once Serve stops the replica, before it kills the process.

        Serve waits for open calls before it calls `__del__`, but a watch would never end.
        """
        await self._wait_for_stop()
        try:
            self.operators.stats_streams.drain()
            ends_at_s = time.monotonic() + self.router.config.drain_timeout_s
            await self._calls_end_within(min(_STALE_ROUTES_S, self.router.config.drain_timeout_s))
            await self.drain(max(0.0, ends_at_s - time.monotonic()))
        finally:
            await self._close()

    async def _wait_for_stop(self) -> None:
        """Wait until Serve stops the replica, or until it calls `__del__`."""
        try:
            while not is_replica_stopping():
                if await self._calls_end_within(_STOP_POLL_S):
                    return
        except Exception:
            logger.exception("cannot read whether Serve stops this replica; it waits for its calls")
            await self._calls_have_ended.wait()

    async def _close(self) -> None:
        """Close everything, even if a part of it fails."""
        async with AsyncExitStack() as others:
            others.push_async_callback(
                self.operators.control.close, self._replica_id, has_failed=self._has_failed
            )
            if self._ingress is not None:
                others.push_async_callback(self._ingress.close)
            await self.router.close()  # first, so that open streams end with an error

    async def _calls_end_within(self, timeout_s: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._calls_have_ended.wait()
        return self._calls_have_ended.is_set()


def _log_access(config: ServeConfig, access: AdminAccess, *, has_keys: bool) -> None:
    """Log what is open to which clients, and whether their tokens could be sampled."""
    level = logging.INFO if has_keys and not access.is_open else logging.WARNING
    logger.log(level, "access: %s", access_summary(access.has_token, has_keys))
    warning = samples_warning(config, access.has_token, has_keys)
    if warning is not None:
        logger.warning("%s", warning)
