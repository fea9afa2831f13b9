"""The HTTP interface."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from cluster.caller_headers import KeepHeaders
from cluster.dashboard import make_dashboard
from cluster.http_admin import admin_routes
from cluster.http_metrics import metric_routes
from cluster.router import Router
from cluster.servicers import AdminServicer


def make_app(get_router: Callable[[], Router], get_admin: Callable[[], AdminServicer]) -> FastAPI:
    """The ASGI application; what it is given is asked at each request, after start-up."""
    app = FastAPI(title="specdec", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(KeepHeaders)
    app.include_router(admin_routes(get_admin))
    app.include_router(make_dashboard(get_router, get_admin))
    app.include_router(metric_routes(get_router, get_admin))

    @app.get("/health")
    async def health() -> JSONResponse:
        """Liveness: 200 while the process serves, loading or not; 503 once the engine is lost."""
        is_lost = get_router().failure is not None
        status = "failed" if is_lost else "ok"
        return JSONResponse({"status": status}, status_code=503 if is_lost else 200)

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Readiness: 200 once the model is warm, 503 before that and while the engine is lost."""
        is_ready = get_router().is_ready
        status = "ready" if is_ready else "not ready"
        return JSONResponse({"status": status}, status_code=200 if is_ready else 503)

    return app
