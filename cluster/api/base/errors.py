"""The one map from errors to gRPC and HTTP status codes and to messages for clients."""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from grpc import StatusCode
from starlette.requests import ClientDisconnect

from specdec.types.errors import (
    AbortedError,
    BodyTooLargeError,
    CrashingRequestError,
    DeadlineExceededError,
    DraftFailedError,
    EncodedBodyError,
    ForeignPageError,
    GrammarError,
    HeadersTooLargeError,
    InvalidValueError,
    LostAdapterError,
    ModelNotFoundError,
    NoNextTokenError,
    NoTokenLeftError,
    NotReadyError,
    OutOfMemoryError,
    OverloadedError,
    SlowBodyError,
    StorageError,
    TargetFailedError,
    UnauthenticatedError,
    UnknownHostError,
    UnknownModelError,
    UnsupportedModelError,
    VersionConflictError,
)

logger = logging.getLogger(__name__)

OVERLOAD_RETRY_AFTER_S = 1
"""Retry hint for a rejected client: a full queue moves within a step or two."""

CLIENT_CLOSED_REQUEST = 499
"""Status of a request that its client has ended, as in nginx."""

INTERNAL_MESSAGE = "internal error; the service's log has the details"
TARGET_FAILED_MESSAGE = "the model stopped responding and this request is lost; retry later"
NO_DESCRIPTOR_MESSAGE = "the service is out of file descriptors; retry later"

FINAL_HEADERS: Mapping[str, str] = {"x-should-retry": "false"}
"""Headers that stop the clients of OpenAI and Anthropic from retrying, which they do by default
after 408, 409, 429 and 5xx."""

_HEADERS_OF: Mapping[int, dict[str, str]] = {
    401: {"WWW-Authenticate": "Bearer"},
    # Otherwise the server reads the rest of the request to keep the connection open.
    408: {"Connection": "close"},
    413: {"Connection": "close"},
    415: {"Connection": "close", "Accept-Encoding": "identity"},
    431: {"Connection": "close"},
    503: {"Connection": "close"},  # the next attempt may reach a replica that does not drain
}


@dataclass(frozen=True)
class ErrorStatus:
    """Status of an error for a client. `retry_after_s` is None if retrying does not help.

    message: in the table of rules, replaces a text that was not written for clients.
    is_final: whether clients get FINAL_HEADERS.
    """

    grpc_code: StatusCode
    http_code: int
    message: str = ""
    retry_after_s: int | None = None
    is_final: bool = False

    @property
    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        """The retry hint as gRPC trailing metadata."""
        return () if self.retry_after_s is None else (("retry-after-s", str(self.retry_after_s)),)

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP headers: hints on retries, and what the status code requires."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.is_final:
            headers |= FINAL_HEADERS
        return headers | _HEADERS_OF.get(self.http_code, {})


# An error that comes from the configuration of the service, or from a combination of fields, is in
# no single field. Google's API guide maps FAILED_PRECONDITION to HTTP 400.
_SETUP = ErrorStatus(StatusCode.FAILED_PRECONDITION, 400)

_RULES: Mapping[type[BaseException], ErrorStatus] = {
    InvalidValueError: ErrorStatus(StatusCode.INVALID_ARGUMENT, 400),
    BodyTooLargeError: ErrorStatus(StatusCode.INVALID_ARGUMENT, 413),
    EncodedBodyError: ErrorStatus(StatusCode.INVALID_ARGUMENT, 415),
    SlowBodyError: ErrorStatus(StatusCode.DEADLINE_EXCEEDED, 408),
    HeadersTooLargeError: ErrorStatus(StatusCode.INVALID_ARGUMENT, 431),
    ForeignPageError: ErrorStatus(StatusCode.PERMISSION_DENIED, 403),
    UnknownHostError: ErrorStatus(StatusCode.PERMISSION_DENIED, 421),
    UnauthenticatedError: ErrorStatus(StatusCode.UNAUTHENTICATED, 401),
    UnknownModelError: ErrorStatus(StatusCode.NOT_FOUND, 404),
    LostAdapterError: ErrorStatus(StatusCode.UNAVAILABLE, 503),
    VersionConflictError: ErrorStatus(StatusCode.ABORTED, 409),
    StorageError: ErrorStatus(StatusCode.FAILED_PRECONDITION, 507),
    GrammarError: _SETUP,
    OverloadedError: ErrorStatus(
        StatusCode.RESOURCE_EXHAUSTED, 429, retry_after_s=OVERLOAD_RETRY_AFTER_S
    ),
    NotReadyError: ErrorStatus(StatusCode.UNAVAILABLE, 503),
    NoTokenLeftError: _SETUP,
    NoNextTokenError: ErrorStatus(StatusCode.INTERNAL, 500),
    CrashingRequestError: ErrorStatus(StatusCode.INTERNAL, 500, is_final=True),
    # gRPC's clients do not retry it by default; each attempt takes as long, and adds load.
    DeadlineExceededError: ErrorStatus(StatusCode.DEADLINE_EXCEEDED, 504, is_final=True),
    AbortedError: ErrorStatus(StatusCode.CANCELLED, CLIENT_CLOSED_REQUEST),
    ClientDisconnect: ErrorStatus(StatusCode.CANCELLED, CLIENT_CLOSED_REQUEST),
    # Its text quotes the exception of a worker.
    TargetFailedError: ErrorStatus(StatusCode.UNAVAILABLE, 503, TARGET_FAILED_MESSAGE),
    DraftFailedError: ErrorStatus(StatusCode.UNAVAILABLE, 503, TARGET_FAILED_MESSAGE),
    OutOfMemoryError: _SETUP,
    ModelNotFoundError: _SETUP,
    UnsupportedModelError: _SETUP,
    Exception: ErrorStatus(StatusCode.INTERNAL, 500, INTERNAL_MESSAGE),
}

_NO_DESCRIPTOR = ErrorStatus(StatusCode.UNAVAILABLE, 503, NO_DESCRIPTOR_MESSAGE)


def status_of(error: Exception) -> ErrorStatus:
    """Return the status of an error. Log an error whose text clients must not see."""
    rule = next(_RULES[kind] for kind in type(error).__mro__ if kind in _RULES)
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        rule = _NO_DESCRIPTOR
    if rule.message:
        logger.error("reported as %s", rule.grpc_code.name, exc_info=error)
        return rule
    retry_after_s = error.retry_after_s if isinstance(error, OverloadedError) else None
    return replace(rule, message=str(error), retry_after_s=retry_after_s or rule.retry_after_s)
