"""The Router as a Ray Serve deployment: one replica, and its orders to the others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import cached_property
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayTaskError

from cluster.api.app import make_app
from cluster.api.base.authentication import (
    AdminAccess,
    ApiKeys,
    access_summary,
    read_keys,
    read_token,
    samples_warning,
)
from cluster.api.base.byte_budget import ByteBudget
from cluster.api.grpc import forwarding
from cluster.api.grpc.forwarding import ForwardedCall
from cluster.api.grpc.servicers import AdminServicer, InferenceServicer
from cluster.api.http import forwarding as http_forwarding
from cluster.api.http.forwarding import ForwardedRequest, ResponseHead
from cluster.api.http.limits import HttpLimits
from cluster.api.ingress import EmbeddedIngress
from cluster.config.serve_config import ServeConfig
from cluster.control.client import ControlClient, StatsStreams
from cluster.control.peers import ROUTER, Applications, ServeDirectory
from cluster.observability import logs
from cluster.replica.orders import (
    AbortOrder,
    OrderResult,
    all_flushed,
    answers_of,
    reports_of,
    result_of,
)
from cluster.replica.router import Router
from cluster.serve.autoscaling import OPEN_REQUESTS
from cluster.serve.draft_host import HostSeats
from cluster.serve.request_router import KV_CACHE_TOKENS
from cluster.serve.router_factory import make_router
from cluster.workers.rank.heap import freeze_heap
from cluster.workers.ray.resources import FoundByDriver
from specdec.types.adapters import AdapterOrder, AdapterReport
from specdec.types.drafters import DrafterOrder, DrafterReport
from specdec.types.errors import InvalidValueError, TargetFailedError
from specdec.types.reports.profile import ProfileOrder, ProfileReport
from specdec.types.responses import ModelInfo
from specdec.types.samples import SampleBatch, SampleOrder

logger = logging.getLogger(__name__)


class RouterReplica(InferenceServicer, AdminServicer):
    """One replica. Its constructor returns when the model is warm, so Serve routes to it then."""

    _is_complete = False  # whether every attribute is set

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: Mapping[str, Any],
        control_plane: Any,
        found: FoundByDriver | None,
        draft_hosts: Any,
    ) -> None:
        serve_config = ServeConfig.from_mapping(config)
        logs.configure(serve_config.logs)
        context = serve.get_replica_context()
        self._application, self._replica_id = context.app_name, context.replica_id.unique_id
        self._has_failed = False
        placement = ray.util.get_current_placement_group()
        router = await asyncio.to_thread(
            make_router,
            serve_config,
            placement,
            self._application,
            self._replica_id,
            found,
            None if draft_hosts is None else HostSeats(draft_hosts),
        )
        control = ControlClient(control_plane, router.apply_speculation, router.report)
        keys = _read_api_keys(serve_config)
        budget = ByteBudget(serve_config.max_inflight_mib * 2**20)
        self.http_limits = HttpLimits.of(serve_config, has_keys=not keys.is_open, budget=budget)
        applications = self._applications(serve_config, router)
        InferenceServicer.__init__(self, router, keys, applications, budget)
        access = AdminAccess(read_token("admin_token_file", serve_config.admin_token_file), keys)
        if found is None:  # otherwise the command reports it
            _log_access(serve_config, access, has_keys=not keys.is_open)
        AdminServicer.__init__(
            self,
            control,
            access,
            StatsStreams(control.fleet),
            self._profile,
            self._order_drafter,
            self._order_adapter,
            self._take_samples,
            applications,
            budget,
            self._abort_requests,
            self._flush_caches,
        )
        self._ingress = (
            EmbeddedIngress(router, self, keys, serve_config, self.http_limits)
            if serve_config.ingress == "embedded"
            else None
        )
        self._is_complete = True
        control.start()
        if self._ingress is not None:
            await self._ingress.start()
        await router.start(placement)
        freeze_heap()
        if self._ingress is not None:
            await self._ingress.set_ready(True)

    def _applications(self, config: ServeConfig, router: Router) -> Applications:
        """Return the other applications, which only Serve's ingress can forward to."""
        is_embedded = config.ingress == "embedded"
        list_peers = None if is_embedded else ServeDirectory(self._application).list_peers
        return Applications(config.served_model_name, list_peers, lambda: router.adapter_names)

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
        return make_app(
            lambda: self.router, lambda: self, lambda: self.keys, lambda: self.http_limits
        )

    async def check_health(self) -> None:
        """Raise once the target has failed permanently, so that Serve replaces the replica."""
        try:
            await self.router.check_models()
        except TargetFailedError:
            self._has_failed = True
            raise
        finally:
            if self._ingress is not None:
                await self._ingress.set_ready(self.router.is_ready)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load for cluster.serve.autoscaling; Serve calls this every few seconds."""
        return {OPEN_REQUESTS: self.router.load_in_requests()}

    async def record_routing_stats(self) -> dict[str, int]:
        """Return what request routers learn of this replica; Serve calls this every 10 s."""
        return {KV_CACHE_TOKENS: self.router.kv_cache_tokens}

    async def _profile(self, order: ProfileOrder) -> ProfileReport:
        """Profile this replica, or forward the order to the replica that it names."""
        if order.replica_id in ("", self._replica_id):
            return await self.router.profile(order)
        return await _profile_other_replica(order, self._application)

    async def profile_if_addressed(self, order: ProfileOrder) -> ProfileReport | None:
        """Profile this replica if the broadcast order names it, else return None."""
        if order.replica_id != self._replica_id:
            return None
        return await self.router.profile(order)

    async def _order_drafter(self, order: DrafterOrder) -> tuple[DrafterReport, ...]:
        """Execute an order on all replicas that it addresses, at once.

        Raises what `reports_of` raises.
        """
        handle = serve.get_deployment_handle(ROUTER, self._application)
        responses = handle.broadcast("order_drafter_if_addressed", order)
        results = await responses.results_async(return_exceptions=True)
        return reports_of(order, results, DrafterReport)

    async def _order_adapter(self, order: AdapterOrder) -> tuple[AdapterReport, ...]:
        """Execute an order on all replicas that it addresses, at once.

        Raises what `reports_of` raises.
        """
        handle = serve.get_deployment_handle(ROUTER, self._application)
        responses = handle.broadcast("order_adapter_if_addressed", order)
        results = await responses.results_async(return_exceptions=True)
        return reports_of(order, results, AdapterReport)

    async def order_adapter_if_addressed(
        self, order: AdapterOrder
    ) -> OrderResult[AdapterReport] | None:
        """Execute a broadcast order, unless it is for another replica."""
        if order.replica_id not in ("", self._replica_id):
            return None
        execution = self.router.order_adapter(order)
        return await result_of(execution, self._replica_id, AdapterReport)

    async def _take_samples(self, order: SampleOrder) -> tuple[SampleBatch, ...]:
        """Take the samples of all replicas that the order addresses.

        Lost ones have none; an error of a replica is logged.
        """
        handle = serve.get_deployment_handle(ROUTER, self._application)
        responses = handle.broadcast("take_samples_if_addressed", order)
        results = await responses.results_async(return_exceptions=True)
        return tuple(answers_of(results, SampleBatch))

    async def take_samples_if_addressed(self, order: SampleOrder) -> SampleBatch | None:
        """Return samples of this replica, unless a broadcast order is for another one."""
        if order.replica_id not in ("", self._replica_id):
            return None
        return self.router.take_samples(order)

    async def _abort_requests(self, order: AbortOrder) -> None:
        """End requests on all replicas; an error of a replica is logged."""
        handle = serve.get_deployment_handle(ROUTER, self._application)
        responses = handle.broadcast("abort_own_requests", order)
        answers_of(await responses.results_async(return_exceptions=True), type(None))

    async def abort_own_requests(self, order: AbortOrder) -> None:
        """End the requests of this replica that a broadcast order applies to."""
        self.router.abort(order)

    async def _flush_caches(self) -> bool:
        """Empty the prefix caches of all replicas without requests; return whether all were.

        Raises what `all_flushed` raises.
        """
        handle = serve.get_deployment_handle(ROUTER, self._application)
        responses = handle.broadcast("flush_own_cache")
        return all_flushed(await responses.results_async(return_exceptions=True))

    async def flush_own_cache(self) -> bool:
        """Empty the prefix cache of this replica, unless requests run or wait."""
        return await self.router.flush_cache()

    async def order_drafter_if_addressed(
        self, order: DrafterOrder
    ) -> OrderResult[DrafterReport] | None:
        """Execute a broadcast order, unless it is for another replica."""
        if order.replica_id not in ("", self._replica_id):
            return None
        execution = self.router.order_drafter(order)
        return await result_of(execution, self._replica_id, DrafterReport)

    async def drain(self, timeout_s: float | None = None) -> None:
        """Become not ready, and wait until all requests have ended or the timeout.

        timeout_s: None for drain_timeout_s; 0 aborts all requests, also of a running drain.
        """
        self.stats_streams.drain()
        if self._ingress is not None:
            await self._ingress.set_ready(False)
        await self.router.drain(timeout_s)

    async def __del__(self) -> None:
        """Shut down; Serve calls this when the replica stops and its own calls have ended.

        It does so even before the constructor has returned, as when a start is interrupted.
        """
        if not self._is_complete:
            return
        await self.drain()
        await self.router.close()  # first, so that open streams end with an error
        if self._ingress is not None:
            await self._ingress.close()
        await self.control.close(self._replica_id, has_failed=self._has_failed)


async def _profile_other_replica(order: ProfileOrder, application: str) -> ProfileReport:
    """Broadcast the order, and return the report of the replica that it names.

    Raises the error of that replica, or InvalidValueError if no replica has the id or it was lost
    in the meantime.
    """
    handle = serve.get_deployment_handle(ROUTER, application)
    responses = handle.broadcast("profile_if_addressed", order)
    for result in await responses.results_async(return_exceptions=True):
        if isinstance(result, ProfileReport):
            return result
        if isinstance(result, RayTaskError):
            raise result.cause from result
    limit = "the id of a replica, as shown by `specdec status`, or left out"
    raise InvalidValueError("replica_id", order.replica_id, limit)


def _read_api_keys(config: ServeConfig) -> ApiKeys:
    keys = read_keys("api_key_file", config.api_key_file)
    return ApiKeys(keys, min_priority=config.min_priority)


def _log_access(config: ServeConfig, access: AdminAccess, *, has_keys: bool) -> None:
    """Log what is open to which clients, and whether their tokens could be sampled."""
    level = logging.INFO if has_keys and not access.is_open else logging.WARNING
    logger.log(level, "access: %s", access_summary(access.has_token, has_keys))
    warning = samples_warning(config, access.has_token, has_keys)
    if warning is not None:
        logger.warning("%s", warning)
