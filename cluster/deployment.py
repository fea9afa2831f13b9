"""The Router as a Ray Serve deployment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.config import gRPCOptions

from cluster.autoscaling import OPEN_REQUESTS, autoscaling_config
from cluster.config import ServeConfig
from cluster.http import make_app
from cluster.ingress import EmbeddedIngress
from cluster.models import ModelDirectories
from cluster.resources import CPUS_PER_ROUTER, memory_per_replica, placement_bundles
from cluster.router import Router
from cluster.servicers import InferenceServicer

APPLICATION = "specdec"
ROUTER = "Router"

_CLOSE_TIMEOUT_S = 10.0
"""What a replica has to end its models and servers, when its requests have ended."""

_HEALTH_CHECK_PERIOD_S = 3.0
# Only the Router rejects: Serve's own bound stands above whatever the engine may queue and run.
_MAX_ONGOING_REQUESTS = 100_000


def _serve_app() -> FastAPI:
    """The HTTP application on Serve's ingress; Serve builds it beside the replica's object."""

    def get_router() -> Router:
        router: Router = serve.get_replica_context().servable_object.router
        return router

    return make_app(get_router)


class RouterReplica(InferenceServicer):
    """One replica. It is made, and so reachable through Serve, only once the model is warm."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: Mapping[str, Any], directories: ModelDirectories, memory_bytes: int
    ) -> None:
        serve_config = ServeConfig.from_mapping(config)
        router = Router(serve_config, directories, memory_bytes)
        super().__init__(router)
        self._ingress = (
            EmbeddedIngress(router, serve_config) if serve_config.ingress == "embedded" else None
        )
        if self._ingress is not None:
            await self._ingress.start()
        await router.start(ray.util.get_current_placement_group())
        if self._ingress is not None:
            await self._ingress.set_ready(True)

    async def check_health(self) -> None:
        """Asked by Serve; raises once the target is lost for good, and the replica is replaced."""
        try:
            await self.router.check_models()
        finally:
            if self._ingress is not None:
                await self._ingress.set_ready(self.router.is_ready)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Asked by Serve every few seconds; the load that cluster.autoscaling judges."""
        return {OPEN_REQUESTS: float(self.router.num_open_requests)}

    async def drain(self) -> None:
        """Not ready any more; returns when no request runs, within the time that there is."""
        if self._ingress is not None:
            await self._ingress.set_ready(False)
        await self.router.drain()

    async def __del__(self) -> None:
        """Called by Serve when the replica stops, and no call that came by Serve is left."""
        await self.drain()
        await self.router.close()  # first, so that open streams end with a reason
        if self._ingress is not None:
            await self._ingress.close()


def make_application(config: ServeConfig, directories: ModelDirectories) -> serve.Application:
    """The deployment, bound to a configuration, with the resources of a replica declared.

    Run again with another configuration, Serve replaces one replica after the other.
    The bundles are packed on as few nodes as they fit; each holds its ranks on one.
    """
    replica = serve.ingress(_serve_app)(RouterReplica)
    deployment = serve.deployment(replica).options(
        name=ROUTER,
        ray_actor_options={"num_cpus": CPUS_PER_ROUTER},
        placement_group_bundles=placement_bundles(config),
        placement_group_strategy="PACK",
        num_replicas=config.num_replicas if config.max_replicas is None else None,
        autoscaling_config=autoscaling_config(config),
        max_ongoing_requests=_MAX_ONGOING_REQUESTS,
        health_check_period_s=_HEALTH_CHECK_PERIOD_S,
        graceful_shutdown_timeout_s=config.drain_timeout_s + _CLOSE_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.5,
    )
    return deployment.bind(config.to_mapping(), directories, memory_per_replica(config))


def grpc_options(config: ServeConfig) -> gRPCOptions:
    """What Serve's own gRPC ingress carries."""
    return gRPCOptions(
        port=config.grpc_port,
        grpc_servicer_functions=[
            "cluster.serve_proxy.restate_answers",
            "protos.specdec.v1.inference_pb2_grpc.add_InferenceServiceServicer_to_server",
            "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server",
        ],
    )
