"""The application of a model: the Router and the ControlPlane, bound to a configuration."""

from __future__ import annotations

from fastapi import FastAPI
from ray import serve
from ray.serve.config import gRPCOptions

from cluster.api.http_app import make_app
from cluster.config.serve_config import ServeConfig
from cluster.control.overrides import OverrideLimits
from cluster.control.peers import CONTROL_PLANE, ROUTER, ServiceCard
from cluster.control.plane import ControlPlaneReplica
from cluster.observability.logs import SERVE_LEVELS
from cluster.serve.autoscaling import autoscaling_config
from cluster.serve.deployment import RouterReplica
from cluster.serve.draft_pool import draft_pool
from cluster.serve.request_router import request_router_config
from cluster.workers.ray.ray_internals import head_node_resource
from cluster.workers.ray.resources import (
    CPUS_PER_ROUTER,
    LocatedModels,
    bundle_labels,
    placement_bundles,
    placement_strategy,
)
from specdec.engine.models.model_detection import with_detected_models
from specdec.models.resolve import log_progress

GRPC_SERVICER_FUNCTIONS = (
    "cluster.api.serve_proxy.grpc.restate_answers",
    "cluster.api.grpc.servicers.add_inference_service",
    "cluster.api.grpc.servicers.add_admin_service",
    "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server",
)
"""The functions to list under `grpc_options` of a Serve config file; the first must come first."""

_CLOSE_TIMEOUT_S = 10.0
"""Time for a replica to stop its models and servers after its requests have ended."""

_HEALTH_CHECK_PERIOD_S = 3.0
# Only the Router rejects requests: Serve's limit is above any queue length of the engine.
_MAX_ONGOING_REQUESTS = 100_000


def make_application(
    config: ServeConfig, located: LocatedModels | None = None
) -> serve.Application:
    """Bind both deployments to a configuration, with the resources of a replica.

    located: None lets each replica locate its models. When deployed again with another
    configuration, Serve updates one replica at a time. The ranks of a bundle are on one node.
    """
    if located is None:
        config = with_detected_models(config, log_progress, downloads=False)
    replica = serve.ingress(_serve_app)(RouterReplica)
    deployment = serve.deployment(replica).options(
        name=ROUTER,
        ray_actor_options={"num_cpus": CPUS_PER_ROUTER},
        placement_group_bundles=placement_bundles(config),
        placement_group_bundle_label_selector=bundle_labels(config),
        placement_group_strategy=placement_strategy(config),
        num_replicas=config.num_replicas if config.max_replicas is None else None,
        autoscaling_config=autoscaling_config(config),
        request_router_config=request_router_config(config.routing_policy),
        max_ongoing_requests=_MAX_ONGOING_REQUESTS,
        health_check_period_s=_HEALTH_CHECK_PERIOD_S,
        logging_config={"log_level": SERVE_LEVELS[config.log_level]},
        graceful_shutdown_timeout_s=config.drain_timeout_s + _CLOSE_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.5,
    )
    pool = draft_pool(config, located) if config.shares_draft_workers else None
    return deployment.bind(config.to_mapping(), _control_plane(config), located, pool)


def _serve_app() -> FastAPI:
    """Return the HTTP application for Serve's ingress, which finds the replica when called."""

    def get_replica() -> RouterReplica:
        replica: RouterReplica = serve.get_replica_context().servable_object
        return replica

    return make_app(
        lambda: get_replica().router,
        lambda: get_replica().operators,
        lambda: get_replica().keys,
        lambda: get_replica().http_limits,
    )


def _control_plane(config: ServeConfig) -> serve.Application:
    """Bind the ControlPlane: one replica without reserved CPUs, which Serve restarts if it dies.

    It runs on the head node, where its state directory is.
    """
    speculation = config.speculative_config
    deployment = serve.deployment(ControlPlaneReplica).options(
        name=CONTROL_PLANE,
        ray_actor_options={"num_cpus": 0, "resources": {head_node_resource(): 0.0001}},
        max_ongoing_requests=_MAX_ONGOING_REQUESTS,
        health_check_period_s=_HEALTH_CHECK_PERIOD_S,
        # No access log: every Router reports each second.
        logging_config={
            "log_level": SERVE_LEVELS[config.log_level],
            "enable_access_log": False,
        },
        # Short, as its state is persisted and the Routers stop too.
        graceful_shutdown_timeout_s=1.0,
        graceful_shutdown_wait_loop_s=0.1,
    )
    limits = (
        OverrideLimits(
            speculation.methods, speculation.verifier, speculation.control.allowed_verifiers
        )
        if speculation
        else OverrideLimits()
    )
    return deployment.bind(
        speculation.control if speculation else None,
        limits,
        config.state_dir,
        ServiceCard(config.served_model_name, config.fewest_replicas),
        config.objective,
    )


def grpc_options(config: ServeConfig) -> gRPCOptions:
    """Return the options of Serve's gRPC ingress for our services."""
    return gRPCOptions(
        port=config.grpc_port,
        grpc_servicer_functions=list(GRPC_SERVICER_FUNCTIONS),
    )
