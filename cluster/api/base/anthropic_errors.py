"""Errors in Anthropic's format, which all paths below `/v1/messages` have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse

from cluster.api.base.openai_errors import Failure
from cluster.api.base.sse import json_event

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_NO_THREADS: Mapping[str, str] = {"error_code": "thread_unsupported_request"}
"""Details of the refusal of a `thread`: the tool runners of the clients then go on without one."""


def failure_response(failure: Failure, path: str) -> Response:
    """Return the response of a request that has sent no status yet, in the format of its path."""
    if "/v1/messages/" not in f"{path}/":
        return failure.respond()
    return JSONResponse(error_body(failure), failure.status, dict(failure.headers))


def error_body(failure: Failure) -> dict[str, Any]:
    """Return the body of a failure."""
    default = "invalid_request_error" if failure.status < 500 else "api_error"
    kind = _TYPES.get(failure.status, default)
    error: dict[str, Any] = {"type": kind, "message": _message(failure)}
    if failure.details.param == "thread":
        error["details"] = _NO_THREADS
    return {"type": "error", "error": error}


def _message(failure: Failure) -> str:
    """Return the message; for an exceeded context length in the words that clients look for."""
    overflow = failure.overflow
    if overflow is None:
        return failure.details.message
    limit = overflow.max_model_len - 1
    return f"prompt is too long: {overflow.num_prompt_tokens} tokens > {limit} maximum"


def error_event(failure: Failure) -> bytes:
    """Return the last event of a stream that fails; clients ignore events without a name."""
    return json_event("error", error_body(failure))
