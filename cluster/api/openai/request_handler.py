"""What every request of the API passes: its id, its key, its size; and where its errors end."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from cluster.api.api_keys import ApiKeys, Lease
from cluster.api.http.csrf import require_same_origin
from cluster.api.http.forwarding import ForwardedRequest, forward, is_forwarded
from cluster.api.openai import field_names
from cluster.api.openai.deadline import Deadline
from cluster.api.openai.errors import ApiError, Failure, failure_of
from cluster.api.openai.request_builder import Terms
from cluster.api.openai.schema import RequestModel
from cluster.api.openai.streams import ClientGoneError, EventStream, unless_disconnected
from cluster.control.peers import Applications
from cluster.observability.logs import current_request_id
from cluster.replica.limits import check_request_id
from cluster.replica.router import Router
from specdec.types.errors import InvalidValueError, SpecdecError, UnknownModelError

REQUEST_ID_HEADER = "x-request-id"
TIMEOUT_HEADER = "x-request-timeout-s"
MAX_JSON_DEPTH = 64
CLIENT_CLOSED_REQUEST = 499
"""Nobody reads it; nginx writes it into its log."""

_MIB = 2**20

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


@dataclass(frozen=True)
class Gate:
    """Where requests come in. What it is given is asked at each request, after start-up."""

    get_router: Callable[[], Router]
    get_keys: Callable[[], ApiKeys]
    get_applications: Callable[[], Applications | None] = lambda: None

    def route_class(self) -> type[APIRoute]:
        """For the routes that are to be behind it."""
        gate = self

        class GatedRoute(APIRoute):
            def get_route_handler(self) -> Handler:
                handle = super().get_route_handler()
                model = _body_model(self)

                async def gated(request: Request) -> Response:
                    return await gate.respond(request, handle, self.path, model)

                return gated

        return GatedRoute

    async def respond(
        self, request: Request, handle: Handler, path: str, model: type[RequestModel] | None
    ) -> Response:
        """What `handle` answers, or the error in OpenAI's shape, with the request's id."""
        request.state.request_id = f"req-{secrets.token_hex(12)}"
        lease = Lease()
        limited = LimitedRequest(request, self._max_body_bytes)
        try:
            self._identify(request)
            lease = self._admit(request)
            if request.method == "POST":
                require_same_origin(request)
            response = await self._answered(limited, handle, lease)
        except ClientGoneError:
            response = Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:
            names = getattr(request.state, "field_names", field_names.BY_PATH.get(path, {}))
            response = self._failure(error, model, names).respond()
        except BaseException:
            lease.release()
            raise
        if isinstance(response, EventStream):
            response.lease = lease
        else:
            lease.release()
        if self.get_router().config.ingress == "embedded":  # Serve adds it to every answer itself
            response.headers[REQUEST_ID_HEADER] = request.state.request_id
        return response

    async def _answered(self, request: LimitedRequest, handle: Handler, lease: Lease) -> Response:
        """Here; or by whoever serves the model, where it is not ours, and then counts it."""
        try:
            return await handle(request)
        except UnknownModelError as error:
            applications = self.get_applications()
            if applications is None or is_forwarded(request):
                raise
            fellow = await applications.elsewhere(error.requested)
            if fellow is None:
                raise
            lease.undo()
            forwarded = ForwardedRequest.of(request, await request.body())
            return await unless_disconnected(request, forward(fellow, forwarded))

    def terms(self, request: Request, request_id: str | None) -> Terms:
        """What holds for a request; `request_id`: in its body."""
        chosen = request.state.request_id if request_id is None else check_request_id(request_id)
        request.state.request_id = chosen
        most_s = self.get_router().config.request_timeout_s
        timeout_s = min(_timeout_s(request.headers.get(TIMEOUT_HEADER)), most_s)
        return Terms(chosen, Deadline.after(timeout_s))

    def count(self, failure: Failure) -> None:
        """Notes an error in the metrics."""
        self.get_router().metrics.count_failure(failure.grpc_code)

    @property
    def _max_body_bytes(self) -> int:
        return self.get_router().config.http_max_body_mib * _MIB

    def _identify(self, request: Request) -> None:
        given = request.headers.get(REQUEST_ID_HEADER)
        if given:
            request.state.request_id = check_request_id(given)
        current_request_id.set(request.state.request_id)

    def _admit(self, request: Request) -> Lease:
        """Whether the caller may ask; what the model runs for takes a place of its key's."""
        authorization = request.headers.get("authorization")
        if request.method == "POST":
            return self.get_keys().admit(authorization)
        self.get_keys().check(authorization)
        return Lease()

    def _failure(
        self, error: Exception, model: type[RequestModel] | None, names: Mapping[str, str]
    ) -> Failure:
        if isinstance(error, HTTPException) and isinstance(error.__cause__, SpecdecError):
            error = error.__cause__  # FastAPI's word for whatever reading a body raises
        failure = failure_of(error, model, names)
        self.count(failure)
        return failure


class LimitedRequest(Request):
    """A request whose body is not larger, and whose JSON is not deeper, than it may be."""

    def __init__(self, request: Request, max_bytes: int) -> None:
        super().__init__(request.scope, request.receive)
        self._max_bytes = max_bytes

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The body in pieces. Raises ApiError 413 as soon as there are too many."""
        declared = self.headers.get("content-length", "0")
        self._check_size(int(declared) if declared.isdecimal() else 0)
        num_bytes = 0
        async for chunk in super().stream():
            num_bytes += len(chunk)
            self._check_size(num_bytes)
            yield chunk

    async def json(self) -> Any:
        """The body's JSON. Raises JSONDecodeError, and InvalidValueError for what is too deep."""
        body = await self.body()
        limit = f"JSON in UTF-8, nested at most {MAX_JSON_DEPTH} deep"
        try:
            content = json.loads(body)
        except json.JSONDecodeError:
            raise
        except (ValueError, RecursionError) as error:  # no UTF-8, or numbers of thousands of digits
            raise InvalidValueError("body", "what was sent", limit) from error
        if _is_deeper(content, MAX_JSON_DEPTH):
            raise InvalidValueError("body", "what was sent", limit)
        if b"\\ud" in body.lower():
            _require_unicode(content)
        return content

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            message = f"the body is {num_bytes} bytes or more; it must be at most {self._max_bytes}"
            raise ApiError(413, message, "request_too_large")


def _body_model(route: APIRoute) -> type[RequestModel] | None:
    """What a route's body is; None for one without."""
    kind = route.body_field.field_info.annotation if route.body_field else None
    return kind if isinstance(kind, type) and issubclass(kind, RequestModel) else None


def _is_deeper(content: Any, depth: int) -> bool:
    level = [content]
    for _ in range(depth):
        level = [each for part in level if isinstance(part, dict | list) for each in _parts(part)]
        if not level:
            return False
    return True


def _require_unicode(content: Any) -> None:
    """JSON can spell halves of surrogate pairs, of which there is no text."""
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        limit = "JSON without halves of surrogate pairs"
        raise InvalidValueError("body", "what was sent", limit) from error


def _parts(part: dict[str, Any] | list[Any]) -> Any:
    return part.values() if isinstance(part, dict) else part


def _timeout_s(header: str | None) -> float:
    if header is None:
        return math.inf
    try:
        timeout_s = float(header)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s < math.inf:
        raise InvalidValueError(TIMEOUT_HEADER, header, "a number of seconds above 0")
    return timeout_s
