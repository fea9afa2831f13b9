"""The routes of the dashboard: static files, event stream, and the try-it box."""

from __future__ import annotations

from collections.abc import Callable
from json import JSONDecodeError
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from cluster.api.dashboard import feed, try_it
from cluster.api.dashboard.assets import SECURITY_HEADERS, load_assets
from cluster.api.grpc.servicers import AdminServicer
from cluster.api.http.admin import error_response
from cluster.api.http.csrf import require_same_origin
from cluster.api.sse import event_response
from cluster.replica.router import Router
from specdec.types.errors import InvalidValueError

INDEX = "index.html"


def make_dashboard(
    get_router: Callable[[], Router], get_admin: Callable[[], AdminServicer]
) -> APIRouter:
    """Return everything below /dashboard; the arguments are called for each request.

    Static files are public; the event stream and the try-it box require the operators' token, if
    one is configured. Paths in the page are relative: it works behind a proxy that adds a prefix.
    """
    routes = APIRouter()
    assets = load_assets()

    @routes.get("/dashboard")
    async def enter() -> Response:
        return RedirectResponse("dashboard/", headers=dict(SECURITY_HEADERS))

    @routes.get("/dashboard/events")
    async def events(request: Request) -> Response:
        """Stream the status of the service, each second, as server-sent events."""
        admin = get_admin()
        try:
            admin.access.check(request.headers.get("authorization"))
            return event_response(await feed.begin(admin, get_router().config.served_model_name))
        except Exception as error:
            return error_response(error)

    @routes.post("/dashboard/generate")
    async def generate(request: Request) -> Response:
        """Stream an answer as server-sent events. Closing the stream aborts the request."""
        try:
            get_admin().access.check(request.headers.get("authorization"))
            require_same_origin(request)
            call = try_it.decode_try_it(await _json(request))
            return event_response(await try_it.begin(get_router(), call))
        except Exception as error:
            return error_response(error)

    @routes.get("/dashboard/{path:path}")
    async def file(path: str, request: Request) -> Response:
        """Serve a file of the page, or 404; no request reads the disk."""
        asset = assets.get(path or INDEX)
        return Response(status_code=404) if asset is None else asset.respond(request)

    return routes


async def _json(request: Request) -> Any:
    try:
        return await request.json()
    except (JSONDecodeError, UnicodeDecodeError) as error:
        raise InvalidValueError("body", "malformed", "JSON") from error
