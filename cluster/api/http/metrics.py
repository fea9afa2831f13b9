"""What Prometheus scrapes: the whole fleet on any Router, or the Router's own replica."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response
from prometheus_client.metrics_core import Metric

from cluster.api.grpc.servicers import AdminServicer
from cluster.api.http.admin import error_response
from cluster.control.client import ControlClient
from cluster.control.peers import Applications
from cluster.observability.metric_definitions import FleetView, LinkView
from cluster.observability.prometheus_text import expose, fleet_families, replica_families
from cluster.replica.router import Router
from specdec.types.errors import NotReadyError
from specdec.types.fleet import FleetStatistics

_SHARED_S = 1.0
"""How long an answer of the ControlPlane serves; replicas report to it no more often."""

_DEADLINE_S = 4.0
"""Of both calls together: less than Prometheus waits, which is 5 s as it is configured here."""


@dataclass(frozen=True)
class _Fleets:
    """The replicas of this application, and those of the others that answer."""

    own: FleetStatistics
    others: dict[str, FleetView]  # by the model's name


class _SharedFleets:
    """Asks each ControlPlane once for all scrapes within a second, however many there are."""

    def __init__(self) -> None:
        self._asking: asyncio.Task[_Fleets] | None = None
        self._asked_at_s = 0.0  # by the event loop's clock

    async def get(self, admin: AdminServicer) -> _Fleets:
        """All replicas, at most a second ago. Raises NotReadyError while nobody answers."""
        now_s = asyncio.get_running_loop().time()
        if self._asking is None or now_s - self._asked_at_s >= _SHARED_S:
            self._asking, self._asked_at_s = asyncio.create_task(_ask(admin)), now_s
        return await asyncio.shield(self._asking)  # whoever leaves, others may wait


async def _ask(admin: AdminServicer) -> _Fleets:
    try:
        async with asyncio.timeout(_DEADLINE_S):
            own, others = await asyncio.gather(
                admin.control.fresh_fleet(), _fleets_of_others(admin.applications)
            )
            return _Fleets(own, others)
    except TimeoutError as error:
        limit = f"the control plane did not answer within {_DEADLINE_S:g} s; try again later"
        raise NotReadyError(limit) from error


async def _fleets_of_others(applications: Applications | None) -> dict[str, FleetView]:
    """Those whose ControlPlane is away are left out: one of them must not blind the others."""
    fellows = () if applications is None else await applications.fellows()
    fleets = await asyncio.gather(*(each.fleet() for each in fellows))
    return {
        each.card.model: fleet
        for each, fleet in zip(fellows, fleets, strict=True)
        if fleet is not None
    }


def metric_routes(
    get_router: Callable[[], Router], get_admin: Callable[[], AdminServicer]
) -> APIRouter:
    """The routes; what they are given is asked at each request, after start-up."""
    routes = APIRouter()
    shared = _SharedFleets()

    @routes.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Every replica of every model as it last reported; 503 while our ControlPlane is away."""
        try:
            fleets = await shared.get(get_admin())
        except NotReadyError as error:
            return error_response(error)
        return await _respond(_of_fleets(get_router(), fleets), request)

    @routes.get("/metrics/replica")
    async def own_metrics(request: Request) -> Response:
        """The replica that answers, whether the ControlPlane is away or not."""
        return await _respond(_of_replica(get_router(), get_admin().control), request)

    return routes


def _of_fleets(router: Router, fleets: _Fleets) -> list[Metric]:
    own = FleetView(fleets.own, router.config.fewest_replicas)
    return fleet_families({router.config.served_model_name: own, **fleets.others})


def _of_replica(router: Router, link: ControlClient) -> list[Metric]:
    view = LinkView(link.is_connected)
    return replica_families(router.config.served_model_name, link.own_status(), view)


async def _respond(families: Sequence[Metric], request: Request) -> Response:
    """On a thread: writing a large fleet down must not hold up the streams."""
    accept = request.headers.get("accept", "")
    exposition = await asyncio.to_thread(expose, families, accept)
    return Response(exposition.body, headers={"content-type": exposition.content_type})
