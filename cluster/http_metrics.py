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
from specdec.client import FleetStatistics
from specdec.errors import NotReadyError

_SHARED_S = 1.0
"""How long an answer of the ControlPlane serves; replicas report to it no more often."""

_DEADLINE_S = 4.0
"""Of both calls together: less than Prometheus waits, which is 5 s as it is configured here."""


class _SharedFleet:
    """Asks the ControlPlane once for all scrapes within a second, however many there are."""

    def __init__(self) -> None:
        self._asking: asyncio.Task[FleetStatistics] | None = None
        self._asked_at_s = 0.0  # by the event loop's clock

    async def get(self, link: ControlLink) -> FleetStatistics:
        """All replicas, at most a second ago. Raises NotReadyError while nobody answers."""
        now_s = asyncio.get_running_loop().time()
        if self._asking is None or now_s - self._asked_at_s >= _SHARED_S:
            self._asking, self._asked_at_s = asyncio.create_task(_ask(link)), now_s
        return await asyncio.shield(self._asking)  # whoever leaves, others may wait


async def _ask(link: ControlLink) -> FleetStatistics:
    try:
        async with asyncio.timeout(_DEADLINE_S):
            return await link.fresh_fleet()
    except TimeoutError as error:
        limit = f"the control plane did not answer within {_DEADLINE_S:g} s; try again later"
        raise NotReadyError(limit) from error


def metric_routes(
    get_router: Callable[[], Router], get_admin: Callable[[], AdminServicer]
) -> APIRouter:
    """The routes; what they are given is asked at each request, after start-up."""
    routes = APIRouter()
    shared = _SharedFleet()

    @routes.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Every replica as it last reported; 503 while the ControlPlane is away."""
        try:
            fleet = await shared.get(get_admin().control)
        except NotReadyError as error:
            return error_response(error)
        return await _respond(_of_fleet(get_router(), fleet), request)

    @routes.get("/metrics/replica")
    async def own_metrics(request: Request) -> Response:
        """The replica that answers, whether the ControlPlane is away or not."""
        return await _respond(_of_replica(get_router(), get_admin().control), request)

    return routes


def _of_fleet(router: Router, fleet: FleetStatistics) -> list[Metric]:
    view = FleetView(fleet, router.config.fewest_replicas)
    return fleet_families(router.config.served_model_name, view)


def _of_replica(router: Router, link: ControlLink) -> list[Metric]:
    view = LinkView(link.is_connected)
    return replica_families(router.config.served_model_name, link.own_status(), view)


async def _respond(families: Sequence[Metric], request: Request) -> Response:
    """On a thread: writing a large fleet down must not hold up the streams."""
    accept = request.headers.get("accept", "")
    exposition = await asyncio.to_thread(expose, families, accept)
    return Response(exposition.body, headers={"content-type": exposition.content_type})
