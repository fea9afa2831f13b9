"""The routes of the page: its files, its feed, and the try-it box."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from json import JSONDecodeError
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse, StreamingResponse

from cluster.api.dashboard import feed, try_it
from cluster.api.dashboard.assets import SECURITY_HEADERS, load_assets
from cluster.api.grpc.servicers import AdminServicer
from cluster.api.http.admin import error_response
from cluster.api.http.csrf import require_own_page
from cluster.replica.router import Router
from specdec.types.errors import InvalidValueError

INDEX = "index.html"


def make_dashboard(
    get_router: Callable[[], Router], get_admin: Callable[[], AdminServicer]
) -> APIRouter:
    """Everything below /dashboard; what it is given is asked at each request, after start-up.

    The files are for everyone. Feed and try-it box ask for the operators' token where there is
    one. Paths in the page are relative, so that it works behind a proxy that adds a prefix.
    """
    routes = APIRouter()
    assets = load_assets()

    @routes.get("/dashboard")
    async def enter() -> Response:
        return RedirectResponse("dashboard/", headers=dict(SECURITY_HEADERS))

    @routes.get("/dashboard/events")
    async def events(request: Request) -> Response:
        """How the service is, each second, as server-sent events."""
        admin = get_admin()
        try:
            admin.access.check(request.headers.get("authorization"))
            return _stream(await feed.begin(admin, get_router().config.served_model_name))
        except Exception as error:
            return error_response(error)

    @routes.post("/dashboard/generate")
    async def generate(request: Request) -> Response:
        """The try-it box's answer as server-sent events. Leaving the stream aborts the request."""
        try:
            get_admin().access.check(request.headers.get("authorization"))
            require_own_page(request)
            call = try_it.decode_try_it(await _json(request))
            return _stream(await try_it.begin(get_router(), call))
        except Exception as error:
            return error_response(error)

    @routes.get("/dashboard/{path:path}")
    async def file(path: str, request: Request) -> Response:
        """A file of the page. A path that names none is 404; nothing is looked up on disk."""
        asset = assets.get(path or INDEX)
        return Response(status_code=404) if asset is None else asset.respond(request)

    return routes


def _stream(events: AsyncIterator[bytes]) -> Response:
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


async def _json(request: Request) -> Any:
    try:
        return await request.json()
    except (JSONDecodeError, UnicodeDecodeError) as error:
        raise InvalidValueError("body", "what was sent", "JSON") from error
