"""The routes of the dashboard: static files, the try-it box, and the event stream."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from cluster.api.base.authentication import Lease
from cluster.api.base.operator_service import OperatorService
from cluster.api.base.sse import event_response, json_event
from cluster.api.dashboard import try_it
from cluster.api.http.admin import error_response
from cluster.api.http.bodies import ApiRequest
from cluster.api.http.origin import require_own_reader, require_same_origin
from cluster.api.openai.streams import EventStream, cancel_on_disconnect, chained
from cluster.replica.router import Router
from specdec.types.deadline import Deadline
from specdec.types.errors import InvalidValueError, NotReadyError
from specdec.types.reports.fleet import FleetStatistics

_CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
    ".md": "text/plain; charset=utf-8",
    "": "text/plain; charset=utf-8",  # LICENSE
}

SECURITY_HEADERS: Mapping[str, str] = {
    # Same origin only: no other host, no inline script or style.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True)
class Asset:
    """One static file. etag: with the quotes of the header."""

    body: bytes
    content_type: str
    etag: str

    def respond(self, request: Request) -> Response:
        """Return the file, or 304 if the browser has this version; it revalidates each time."""
        headers = {**SECURITY_HEADERS, "cache-control": "no-cache", "etag": self.etag}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.body, headers={**headers, "content-type": self.content_type})


def load_assets() -> dict[str, Asset]:
    """Read every file, by its path below static/."""
    root = Path(__file__).parent / "static"
    files = (path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): _asset(path) for path in files}


def _asset(path: Path) -> Asset:
    body = path.read_bytes()
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    return Asset(body, _CONTENT_TYPES[path.suffix], etag)


def make_dashboard(
    get_router: Callable[[], Router], get_admin: Callable[[], OperatorService]
) -> APIRouter:
    """Return everything below /dashboard; the arguments are called for each request.

    Static files are public; the event stream and the try-it box require what administration does.
    Paths in the page are relative: it works behind a proxy that adds a prefix.
    """
    routes = APIRouter()
    assets = load_assets()
    moments = SharedMoments()

    @routes.get("/dashboard")
    async def enter() -> Response:
        return RedirectResponse("dashboard/", headers=dict(SECURITY_HEADERS))

    @routes.get("/dashboard/events")
    async def events(request: Request) -> Response:
        """Stream the status of the service, each second, as server-sent events."""
        admin = get_admin()
        try:
            admin.access.check(request.headers.get("authorization"))
            require_own_reader(request)
            model = get_router().config.served_model_name
            return event_response(await fleet_events(admin, model, moments))
        except Exception as error:
            return error_response(error)

    @routes.post("/dashboard/generate")
    async def generate(request: Request) -> Response:
        """Stream an answer as server-sent events. Closing the stream aborts the request."""
        return await _answer(get_router, get_admin, request)

    @routes.get("/dashboard/{path:path}")
    async def file(path: str, request: Request) -> Response:
        """Serve a file of the page, or 404; no request reads the disk."""
        asset = assets.get(path or "index.html")
        return Response(status_code=404) if asset is None else asset.respond(request)

    return routes


async def _answer(
    get_router: Callable[[], Router], get_admin: Callable[[], OperatorService], request: Request
) -> Response:
    """Return the stream of an answer, or the error."""
    try:
        lease = get_admin().access.admit(request.headers.get("authorization"))
    except Exception as error:
        return error_response(error)
    try:
        return await _generate(get_router(), request, lease)
    except BaseException as error:
        lease.release()
        if not isinstance(error, Exception):
            raise
        return error_response(error)


async def _generate(router: Router, request: Request, lease: Lease) -> EventStream:
    """Return the answer, which releases the lease at its end."""
    require_same_origin(request)
    call = try_it.decode_try_it(await _json(request))
    deadline = Deadline.after(router.config.request_timeout_s)
    events = await cancel_on_disconnect(request, try_it.begin(router, call, deadline))
    stream = EventStream(events, events, deadline)
    stream.lease = lease
    return stream


async def _json(request: Request) -> Any:
    try:
        return await ApiRequest(request.scope, request.receive).json()
    except JSONDecodeError as error:
        raise InvalidValueError("body", "malformed", "JSON") from error


class SharedMoments:
    """The events `now`, each made once for all pages that show the same points so far."""

    def __init__(self) -> None:
        self._fleet: FleetStatistics | None = None
        self._made: dict[float, asyncio.Future[Moment]] = {}  # by the end of the points so far

    async def at(
        self, admin: OperatorService, fleet: FleetStatistics, sent_until_s: float
    ) -> Moment:
        """Return the event with the statistics and the points after a time. Raise NotReadyError."""
        if fleet is not self._fleet:
            self._fleet, self._made = fleet, {}
        if sent_until_s not in self._made:
            making = self._make(admin, fleet, sent_until_s)
            self._made[sent_until_s] = asyncio.ensure_future(making)
        return await asyncio.shield(self._made[sent_until_s])  # other pages may wait for it too

    async def _make(
        self, admin: OperatorService, fleet: FleetStatistics, sent_until_s: float
    ) -> Moment:
        figures = await admin.control.history(sent_until_s)
        data = {
            "status": asdict(fleet.status),
            "replicas_needed": fleet.replicas_needed,
            "figures": [asdict(each) for each in figures],
        }
        return Moment(json_event("now", data), figures[-1].time_s if figures else sent_until_s)


@dataclass(frozen=True)
class Moment:
    """An event `now`. until_s: the time of its last point, in seconds since 1970."""

    event: bytes
    until_s: float


async def fleet_events(
    admin: OperatorService, model: str, shared: SharedMoments
) -> AsyncGenerator[bytes, None]:
    """Return the events of a page: `hello`, then `now` each second, and `end` on a drain.

    Raise what the first query of the fleet raises, before the response has a status code.
    """
    moments = admin.stats_streams.watch(0)
    first = await anext(moments)
    return _events(admin, model, shared, chained(first, moments))


async def _events(
    admin: OperatorService,
    model: str,
    shared: SharedMoments,
    moments: AsyncGenerator[FleetStatistics, None],
) -> AsyncGenerator[bytes, None]:
    until_s = 0.0
    async with aclosing(moments):
        yield json_event("hello", {"model": model})
        try:
            async for fleet in moments:
                moment = await shared.at(admin, fleet, until_s)
                until_s = moment.until_s
                yield moment.event
        except NotReadyError as error:
            yield json_event("end", {"message": str(error)})
