"""The event stream of the dashboard: fleet status and chart points, each second."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict

from cluster.api.grpc.servicers import AdminServicer
from cluster.api.sse import json_event
from cluster.control.timeseries import Figures
from specdec.types.errors import NotReadyError
from specdec.types.fleet import FleetStatistics


async def begin(admin: AdminServicer, model: str) -> AsyncGenerator[bytes, None]:
    """Return the events of a page: `hello`, then `now` each second, and `end` on a drain.

    Raise what the first query of the fleet raises, before the response has a status code.
    """
    moments = admin.stats_streams.watch(0)
    first = await anext(moments)
    return _events(admin, model, first, moments)


async def _events(
    admin: AdminServicer,
    model: str,
    first: FleetStatistics,
    moments: AsyncGenerator[FleetStatistics, None],
) -> AsyncGenerator[bytes, None]:
    sent_until_s = 0.0
    async with aclosing(moments):
        yield json_event("hello", {"model": model})
        try:
            figures = await admin.control.history(0.0)
            yield _now(first, figures)
            async for fleet in moments:
                sent_until_s = figures[-1].time_s if figures else sent_until_s
                figures = await admin.control.history(sent_until_s)
                yield _now(fleet, figures)
        except NotReadyError as error:
            yield json_event("end", {"message": str(error)})


def _now(fleet: FleetStatistics, figures: tuple[Figures, ...]) -> bytes:
    points = [asdict(each) for each in figures]
    return json_event("now", {"status": asdict(fleet.status), "figures": points})
