"""Errors in Anthropic's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse

from cluster.api.openai.errors import Failure
from cluster.api.openai.request_handler import RequestHandler

_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(failure: Failure) -> dict[str, Any]:
    """Return the body of a failure."""
    kind = _TYPES.get(failure.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": failure.details.message}}


class MessagesHandler(RequestHandler):
    """Wrapper of the routes, with Anthropic's errors."""

    def failure_response(self, failure: Failure) -> Response:
        """Return the response of a request that has sent no status yet."""
        return JSONResponse(error_body(failure), failure.status, dict(failure.headers))
