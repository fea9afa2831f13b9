"""The Prometheus endpoints: the metrics of the whole fleet, or of one replica."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from fastapi import APIRouter, Request, Response
from prometheus_client.metrics_core import Metric

from cluster.api.base.operator_service import OperatorService
from cluster.api.http.admin import error_response
from cluster.control.peers import Applications
from cluster.observability.metric_definitions import FleetView
from cluster.observability.prometheus_text import expose, fleet_families, replica_families
from cluster.replica.router import Router
from specdec.types.errors import NotReadyError

_CACHED_S = 1.0
"""How long a reply of the ControlPlane is reused; replicas report to it no more often."""

_DEADLINE_S = 4.0
"""For both calls together: less than the scrape timeout of Prometheus, configured as 5 s."""


class _FleetCache:
    """Queries each ControlPlane at most once a second, however many scrapes there are."""

    def __init__(self) -> None:
        self._query: asyncio.Task[dict[str, FleetView]] | None = None
        self._queried_at_s = 0.0  # by the event loop's clock

    async def get(self, router: Router, admin: OperatorService) -> dict[str, FleetView]:
        """Return all fleets by model, at most a second old. Raise NotReadyError on a timeout."""
        now_s = asyncio.get_running_loop().time()
        if self._query is None or now_s - self._queried_at_s >= _CACHED_S:
            self._query, self._queried_at_s = asyncio.create_task(_query(router, admin)), now_s
        return await asyncio.shield(self._query)  # other scrapes may wait for it too


async def _query(router: Router, admin: OperatorService) -> dict[str, FleetView]:
    try:
        async with asyncio.timeout(_DEADLINE_S):
            own, others = await asyncio.gather(
                admin.control.fresh_fleet(), _fleets_of_others(admin.applications)
            )
    except TimeoutError as error:
        message = f"the control plane did not answer within {_DEADLINE_S:g} s; try again later"
        raise NotReadyError(message) from error
    own_view = FleetView(own, router.config.fewest_replicas)
    return {router.config.served_model_name: own_view, **others}


async def _fleets_of_others(applications: Applications | None) -> dict[str, FleetView]:
    """Query the other applications; omit those whose ControlPlane does not respond."""
    peers = () if applications is None else await applications.peers()
    fleets = await asyncio.gather(*(each.fleet() for each in peers))
    return {
        each.card.model: fleet
        for each, fleet in zip(peers, fleets, strict=True)
        if fleet is not None
    }


def metric_routes(
    get_router: Callable[[], Router], get_admin: Callable[[], OperatorService]
) -> APIRouter:
    """Return the routes; the arguments are called for each request."""
    routes = APIRouter()
    cache = _FleetCache()

    @routes.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Report every replica of every model; 503 while our ControlPlane does not respond."""
        try:
            fleets = await cache.get(get_router(), get_admin())
        except NotReadyError as error:
            return error_response(error)
        aliases = get_router().config.metric_aliases
        return await _respond(fleet_families(fleets, aliases), request)

    @routes.get("/metrics/replica")
    async def own_metrics(request: Request) -> Response:
        """Report this replica, whether the ControlPlane responds or not.

        The parameter `name[]`, which may be repeated, selects metrics, as in Prometheus' client.
        """
        config, control = get_router().config, get_admin().control
        families = replica_families(
            config.served_model_name,
            control.own_status(),
            is_connected=control.is_connected,
            aliases=config.metric_aliases,
            names=frozenset(request.query_params.getlist("name[]")),
        )
        return await _respond(families, request)

    return routes


async def _respond(families: Sequence[Metric], request: Request) -> Response:
    """Serialize on a thread: a large fleet must not block the event loop."""
    accept = request.headers.get("accept", "")
    exposition = await asyncio.to_thread(expose, families, accept)
    return Response(exposition.body, headers={"content-type": exposition.content_type})
