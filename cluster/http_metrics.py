"""What Prometheus scrapes: the whole fleet on any Router, or the Router's own replica."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from fastapi import APIRouter, Request, Response
from prometheus_client.metrics_core import Metric

from cluster.control_link import ControlLink
from cluster.exposition import expose, fleet_families, replica_families
from cluster.http_admin import error_response
from cluster.metric_catalogue import FleetView, LinkView
from cluster.router import Router
from cluster.servicers import AdminServicer
from specdec.errors import NotReadyError


def metric_routes(
    get_router: Callable[[], Router], get_admin: Callable[[], AdminServicer]
) -> APIRouter:
    """The routes; what they are given is asked at each request, after start-up."""
    routes = APIRouter()

    @routes.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Every replica as it last reported; 503 while the ControlPlane is away."""
        try:
            families = await _of_fleet(get_router(), get_admin().control)
        except NotReadyError as error:
            return error_response(error)
        return await _respond(families, request)

    @routes.get("/metrics/replica")
    async def own_metrics(request: Request) -> Response:
        """The replica that answers, whether the ControlPlane is away or not."""
        return await _respond(_of_replica(get_router(), get_admin().control), request)

    return routes


async def _of_fleet(router: Router, link: ControlLink) -> list[Metric]:
    view = FleetView(await link.fresh_fleet(), router.config.fewest_replicas)
    return fleet_families(router.config.served_model_name, view)


def _of_replica(router: Router, link: ControlLink) -> list[Metric]:
    view = LinkView(link.is_connected)
    return replica_families(router.config.served_model_name, link.own_status(), view)


async def _respond(families: Sequence[Metric], request: Request) -> Response:
    """On a thread: writing a large fleet down must not hold up the streams."""
    accept = request.headers.get("accept", "")
    exposition = await asyncio.to_thread(expose, families, accept)
    return Response(exposition.body, headers={"content-type": exposition.content_type})
