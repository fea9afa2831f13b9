"""The HTTP interface."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib.metadata import version

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.api.anthropic.routes import messages_routes
from cluster.api.base.anthropic_errors import failure_response
from cluster.api.base.authentication import ApiKeys
from cluster.api.base.openai_errors import failure_of
from cluster.api.base.operator_service import OperatorService
from cluster.api.dashboard import make_dashboard
from cluster.api.dashboard.routes import SECURITY_HEADERS
from cluster.api.http.admin import admin_routes, lora_routes
from cluster.api.http.bodies import LimitBodies
from cluster.api.http.limits import HttpLimits
from cluster.api.http.metrics import metric_routes
from cluster.api.http.origin import CheckHost
from cluster.api.openai.request_handler import direct_routes
from cluster.api.openai.routes import openai_routes
from cluster.api.sglang.routes import sglang_routes
from cluster.config.config_file import PATHS_OF_THE_SERVICE
from cluster.control.peers import Applications
from cluster.observability.request_context import keep_headers
from cluster.replica.router import Router
from specdec.types.errors import NotReadyError

_MAX_PATH_CHARS = 100
"""Limit for an unknown path in its error."""


def make_app(
    get_router: Callable[[], Router],
    get_admin: Callable[[], OperatorService],
    get_keys: Callable[[], ApiKeys] = ApiKeys,
    get_limits: Callable[[], HttpLimits] = HttpLimits,
    *,
    has_peers: bool = True,
) -> FastAPI:
    """Build the ASGI application; the functions are called for each request.

    has_peers: whether other applications may serve other models, to which requests are forwarded.
    /openapi.json describes the routes for clients; docs/ describes those for operators.
    """
    get_applications = (lambda: get_admin().applications) if has_peers else None
    openai = openai_routes(get_router, get_keys, get_applications)
    messages = messages_routes(get_router, get_keys, get_applications)
    sglang = sglang_routes(get_router, get_keys, get_admin)
    direct = direct_routes(openai, messages, sglang)
    app = HttpApp(get_limits, direct)
    app.include_router(openai)
    app.include_router(messages, include_in_schema=False)
    app.include_router(sglang, include_in_schema=False)
    app.include_router(admin_routes(get_admin), include_in_schema=False)
    app.include_router(lora_routes(get_admin), include_in_schema=False)
    app.include_router(make_dashboard(get_router, get_admin), include_in_schema=False)
    app.include_router(metric_routes(get_router, get_admin), include_in_schema=False)
    _report_errors(app, (*direct, "/v1/models"), get_applications)
    _add_probes(app, get_router)
    return app


class HttpApp(FastAPI):
    """Application whose POST routes with JSON bodies run without FastAPI, which describes them.

    FastAPI and Starlette run exit stacks, dependencies and middleware for each request.
    """

    def __init__(self, get_limits: Callable[[], HttpLimits], direct: Mapping[str, ASGIApp]) -> None:
        """direct: applications by the path of their route."""
        super().__init__(
            title="specdec",
            summary="Text generation with speculative decoding, compatible with the OpenAI API",
            version=version("specdec"),
            docs_url=None,
            redoc_url=None,
            separate_input_output_schemas=False,
        )
        self._direct = direct
        limited = LimitBodies(self._answer, get_limits)
        self._checked = CheckHost(limited, lambda: get_limits().hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or the events of the server's life.

        An error before the response has begun is reported in it, and raised for the server's log.
        """
        has_begun = scope["type"] != "http"

        def sending(message: Message) -> Awaitable[None]:
            nonlocal has_begun
            has_begun = True
            return send(message)

        try:
            await self._checked(scope, receive, sending)
        except Exception as error:
            if not has_begun:
                await failure_response(failure_of(error), scope["path"])(scope, receive, send)
            raise

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        direct = None
        if scope["type"] == "http":
            keep_headers(scope)
        if scope.get("method") == "HEAD":
            scope, send = {**scope, "method": "GET"}, _sending_head(send)
        if scope.get("method") == "POST":
            direct = self._direct.get(scope["path"].removeprefix(scope.get("root_path", "")))
        await (direct or super().__call__)(scope, receive, send)


def _sending_head(send: Send) -> Send:
    """Return a function that sends the head of a response to GET, and drops its content.

    The response ends with its head, so a stream ends, too.
    """

    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send(message)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return send_head


def _prefix_of_another(request: Request) -> str:
    """Return the prefix of a path of another application, by its form; "" for any other path."""
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    first, second = (*path.split("/"), "", "")[1:3]
    is_ours = first in PATHS_OF_THE_SERVICE or second not in PATHS_OF_THE_SERVICE
    return "" if is_ours else first


def _is_browser_at_root(request: Request) -> bool:
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    accepts = request.headers.get("accept", "")
    return request.method == "GET" and path == "/" and "text/html" in accepts


def _allowed(error: HTTPException) -> str:
    """Return the methods of a path; HEAD is one where GET is."""
    methods = {*(error.headers or {}).get("Allow", "").split(", ")}
    return ", ".join(sorted(methods | {"HEAD"} if "GET" in methods else methods))


def _detail(request: Request, error: HTTPException, known_paths: Sequence[str]) -> str:
    path, root = request.scope["path"][:_MAX_PATH_CHARS], request.scope.get("root_path", "")
    if error.status_code == 404:
        nearest = get_close_matches(path.removeprefix(root), known_paths, n=1, cutoff=0.8)
        hint = f"did you mean {root}{nearest[0]}? " if nearest else ""
        return f"no such path: {path}; {hint}{root}/openapi.json lists those of the API"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return f"method {request.method} is not allowed for {path}; use {allowed}"
    return error.detail


def _report_errors(
    app: FastAPI,
    known_paths: Sequence[str],
    get_applications: Callable[[], Applications | None] | None,
) -> None:
    """Report the errors that no route reports in the same format as all others.

    known_paths: of which the error of an unknown path names the nearest, as where a client's base
    URL lacks /v1 or has it twice.
    """

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        """Report an unknown path or method in the same format as all other errors.

        A browser that opens / is redirected to the dashboard. The paths of another application
        arrive here while it is redeployed.
        """
        if _is_browser_at_root(request):
            return RedirectResponse("dashboard/", headers=dict(SECURITY_HEADERS))
        if error.status_code == 405:
            error.headers = {"Allow": _allowed(error)}
        error.detail = _detail(request, error, known_paths)
        name = _prefix_of_another(request)
        applications = get_applications() if get_applications and name else None
        try:
            if applications is not None:
                applications.expect_application(name)
        except NotReadyError as absence:
            return failure_response(failure_of(absence), request.scope["path"])
        return failure_response(failure_of(error), request.scope["path"])

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> Response:
        """Report an error of a route that reports none itself; the server logs it."""
        return failure_response(failure_of(error), request.scope["path"])


def _add_probes(app: FastAPI, get_router: Callable[[], Router]) -> None:
    @app.get("/health", include_in_schema=False)
    async def health() -> JSONResponse:
        """Report liveness: 200 while the process serves or loads, 503 once the engine is lost."""
        is_lost = get_router().failure is not None
        return _probed("failed" if is_lost else "ok", is_well=not is_lost)

    @app.get("/ready", include_in_schema=False)
    async def ready() -> JSONResponse:
        """Report readiness: 200 once the model is warm, 503 before and while the engine is lost."""
        is_ready = get_router().is_ready
        return _probed("ready" if is_ready else "not ready", is_well=is_ready)


def _probed(status: str, is_well: bool) -> JSONResponse:
    """Return 200, or 503 that closes the connection, as every 503 does."""
    code = 200 if is_well else 503
    return JSONResponse({"status": status}, code, {} if is_well else {"Connection": "close"})
