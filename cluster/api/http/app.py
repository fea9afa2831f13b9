"""The HTTP interface."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from cluster.api.api_keys import ApiKeys
from cluster.api.dashboard import make_dashboard
from cluster.api.grpc.servicers import AdminServicer
from cluster.api.http.admin import admin_routes
from cluster.api.http.metrics import metric_routes
from cluster.api.openai.errors import failure_of
from cluster.api.openai.routes import openai_routes
from cluster.observability.request_context import KeepHeaders
from cluster.replica.router import Router


def make_app(
    get_router: Callable[[], Router],
    get_admin: Callable[[], AdminServicer],
    get_keys: Callable[[], ApiKeys] = ApiKeys,
) -> FastAPI:
    """The ASGI application; what it is given is asked at each request, after start-up.

    /openapi.json describes what clients call; the rest is for operators, and described in docs/.
    """
    app = FastAPI(
        title="specdec",
        summary="Text generation with speculative decoding, as the OpenAI API has it",
        version=version("specdec"),
        docs_url=None,
        redoc_url=None,
        separate_input_output_schemas=False,
    )
    app.add_middleware(KeepHeaders)
    app.include_router(openai_routes(get_router, get_keys, lambda: get_admin().applications))
    app.include_router(admin_routes(get_admin), include_in_schema=False)
    app.include_router(make_dashboard(get_router, get_admin), include_in_schema=False)
    app.include_router(metric_routes(get_router, get_admin), include_in_schema=False)

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        """A path or a method that there is none of, in the shape of all other errors."""
        return failure_of(error).respond()

    @app.get("/health", include_in_schema=False)
    async def health() -> JSONResponse:
        """Liveness: 200 while the process serves, loading or not; 503 once the engine is lost."""
        is_lost = get_router().failure is not None
        status = "failed" if is_lost else "ok"
        return JSONResponse({"status": status}, status_code=503 if is_lost else 200)

    @app.get("/ready", include_in_schema=False)
    async def ready() -> JSONResponse:
        """Readiness: 200 once the model is warm, 503 before that and while the engine is lost."""
        is_ready = get_router().is_ready
        status = "ready" if is_ready else "not ready"
        return JSONResponse({"status": status}, status_code=200 if is_ready else 503)

    return app
