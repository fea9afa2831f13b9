"""The routes of the page: its files, and the try-it box."""

from __future__ import annotations

from collections.abc import Callable
from json import JSONDecodeError
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse, StreamingResponse

from cluster.dashboard import try_it
from cluster.dashboard.assets import SECURITY_HEADERS, load_assets
from cluster.dashboard.same_origin import require_own_page
from cluster.errors import status_of
from cluster.router import Router
from specdec.errors import InvalidValueError

INDEX = "index.html"


def make_dashboard(get_router: Callable[[], Router]) -> APIRouter:
    """Everything below /dashboard; `get_router` is asked at each request, after start-up.

    Paths in the page are relative, so that it works behind a proxy that adds a prefix.
    """
    routes = APIRouter()
    assets = load_assets()

    @routes.get("/dashboard")
    async def enter() -> Response:
        return RedirectResponse("dashboard/", headers=dict(SECURITY_HEADERS))

    @routes.get("/dashboard/{path:path}")
    async def file(path: str, request: Request) -> Response:
        """A file of the page. A path that names none is 404; nothing is looked up on disk."""
        asset = assets.get(path or INDEX)
        return Response(status_code=404) if asset is None else asset.respond(request)

    @routes.post("/dashboard/generate", dependencies=[Depends(require_own_page)])
    async def generate(request: Request) -> Response:
        """The try-it box's answer as server-sent events. Leaving the stream aborts the request."""
        try:
            call = try_it.decode_try_it(await _json(request))
            events = await try_it.begin(get_router(), call)
        except Exception as error:
            return _refusal(error)
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    return routes


async def _json(request: Request) -> Any:
    try:
        return await request.json()
    except (JSONDecodeError, UnicodeDecodeError) as error:
        raise InvalidValueError("body", "what was sent", "JSON") from error


def _refusal(error: Exception) -> JSONResponse:
    status = status_of(error)
    told: dict[str, Any] = {"code": status.grpc_code.name, "message": status.message}
    if isinstance(error, InvalidValueError):
        told["field"] = error.field
    return JSONResponse({"error": told}, status_code=status.http_code, headers=status.headers)
