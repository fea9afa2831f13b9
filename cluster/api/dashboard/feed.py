"""What the page is told each second: how the fleet is, and the points of its charts."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict

from cluster.api.grpc.servicers import AdminServicer
from cluster.api.sse import event
from cluster.control.timeseries import Figures
from specdec.types.errors import NotReadyError
from specdec.types.fleet import FleetStatistics


async def begin(admin: AdminServicer, model: str) -> AsyncGenerator[bytes, None]:
    """The events of a page that opens: `hello`, then `now` each second, and `end` for a drain.

    Raises what the first look at the fleet raises, while there is still a status code to say it
    with.
    """
    moments = admin.watches.watch(0)
    first = await anext(moments)
    return _events(admin, model, first, moments)


async def _events(
    admin: AdminServicer,
    model: str,
    first: FleetStatistics,
    moments: AsyncGenerator[FleetStatistics, None],
) -> AsyncGenerator[bytes, None]:
    told_s = 0.0
    async with aclosing(moments):
        yield event("hello", {"model": model})
        try:
            figures = await admin.control.history(0.0)
            yield _now(first, figures)
            async for fleet in moments:
                told_s = figures[-1].time_s if figures else told_s
                figures = await admin.control.history(told_s)
                yield _now(fleet, figures)
        except NotReadyError as error:
            yield event("end", {"message": str(error)})


def _now(fleet: FleetStatistics, figures: tuple[Figures, ...]) -> bytes:
    points = [asdict(each) for each in figures]
    return event("now", {"status": asdict(fleet.status), "figures": points})
