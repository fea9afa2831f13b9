"""Handling that all requests share: request id, API key, body limits, and error responses."""

from __future__ import annotations

import math
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from inspect import signature
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Header, Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.api.base.anthropic_errors import failure_response
from cluster.api.base.authentication import ApiKeys
from cluster.api.base.errors import CLIENT_CLOSED_REQUEST
from cluster.api.base.openai_errors import Failure, failure_of
from cluster.api.base.openai_schema import ErrorBody, RequestModel, ResponseModel
from cluster.api.http.bodies import ApiRequest
from cluster.api.http.forwarding import ForwardedRequest, find_peer, forward
from cluster.api.http.origin import require_same_origin
from cluster.api.openai.builders import RequestContext
from cluster.api.openai.streams import (
    EventStream,
    cancel_on_disconnect,
)
from cluster.control.peers import Applications
from cluster.observability.logs import current_request_id
from cluster.replica.limits import check_request_id
from cluster.replica.router import Router
from specdec.types.deadline import Deadline
from specdec.types.errors import InvalidValueError, SpecdecError, UnknownModelError

REQUEST_ID_HEADER = "x-request-id"
_RAW_ID_HEADER = REQUEST_ID_HEADER.encode()
TIMEOUT_HEADER = "x-request-timeout-s"

_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "a field is invalid; the message names it"},
    401: {"model": ErrorBody, "description": "the API key is missing or unknown"},
    403: {"model": ErrorBody, "description": "a cross-site request of a browser"},
    404: {"model": ErrorBody, "description": "no such model"},
    408: {"model": ErrorBody, "description": "the body did not arrive in time"},
    413: {"model": ErrorBody, "description": "the body is too large"},
    415: {"model": ErrorBody, "description": "the body is compressed"},
    421: {"model": ErrorBody, "description": "the host name is not one of the service's"},
    429: {"model": ErrorBody, "description": "too many requests; Retry-After has a hint"},
    500: {"model": ErrorBody, "description": "an internal error; the log has the details"},
    503: {"model": ErrorBody, "description": "the model is starting, stopping or lost"},
    504: {"model": ErrorBody, "description": "the deadline of the request has passed"},
}

RouteHandler = Callable[[ApiRequest], Coroutine[Any, Any, Response]]


async def declare_headers(
    x_request_id: Annotated[
        str | None,
        Header(description="id of the request in answers and logs; at most 128 ASCII characters"),
    ] = None,
    x_request_timeout_s: Annotated[
        str | None, Header(description="timeout in seconds; at most the configured one")
    ] = None,
) -> None:
    """Declare the headers for /openapi.json; RequestHandler reads them.

    Async, because FastAPI runs other dependencies on a thread.
    """


@dataclass(frozen=True)
class RequestHandler:
    """Wrapper of every route of the API. Its fields are called for each request.

    get_applications: None where there can be no other application to forward to. id_headers: of
    the request id in responses, where the API's clients read it.
    """

    get_router: Callable[[], Router]
    get_keys: Callable[[], ApiKeys]
    get_applications: Callable[[], Applications | None] | None = None
    id_headers: ClassVar[tuple[bytes, ...]] = (_RAW_ID_HEADER,)

    def route_class(self) -> type[HandledRoute]:
        """Return a route class whose routes pass through this handler."""
        return type("HandledRoute", (HandledRoute,), {"handler": self})

    async def respond(
        self, request: ApiRequest, handle: RouteHandler, model: type[RequestModel] | None
    ) -> Response:
        """Run `handle`; return its response or an error, with the request id."""
        is_embedded = self.get_router().config.ingress == "embedded"  # Serve adds the id itself
        try:
            self._identify(request)
            self._admit(request)
            if request.method == "POST":
                require_same_origin(request)
            response = await handle(request)
        except Exception as error:
            request.lease.release()  # before the response, which can fail, too
            response = self._failed(request, _unwrapped(error), model)
        except BaseException:
            request.lease.release()
            raise
        if isinstance(response, EventStream):
            response.lease = request.lease
        else:
            request.lease.release()
        added = [each for each in self.id_headers if is_embedded or each != _RAW_ID_HEADER]
        kept = [each for each in response.raw_headers if each[0] not in added]  # of a peer
        response.raw_headers = [*kept, *((name, request.request_id.encode()) for name in added)]
        return response

    def _failed(
        self, request: ApiRequest, error: Exception, model: type[RequestModel] | None
    ) -> Response:
        """Count an error and return its response; a client that has left gets none."""
        if isinstance(error, ClientDisconnect):
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        names = request.get_names() if request.get_names else {}
        failure = failure_of(error, model, names)
        self.count(failure)
        return failure_response(failure, request.scope["path"])

    def context(self, request: ApiRequest, request_id: str | None) -> RequestContext:
        """Return the id and deadline of a request; `request_id` is the one in its body."""
        if request_id is not None:
            request.request_id = check_request_id(request_id)
        limit_s = self.get_router().config.request_timeout_s
        timeout_s = min(_timeout_s(request.headers.get(TIMEOUT_HEADER)), limit_s)
        return RequestContext(request.request_id, Deadline.after(timeout_s))

    def count(self, failure: Failure) -> None:
        """Count an error in the metrics."""
        self.get_router().metrics.count_failure(failure.grpc_code)

    def _identify(self, request: ApiRequest) -> None:
        request.request_id = f"req-{secrets.token_hex(12)}"
        given = request.headers.get(REQUEST_ID_HEADER)
        if given:
            request.request_id = check_request_id(given)
        current_request_id.set(request.request_id)

    def _admit(self, request: ApiRequest) -> None:
        """Check the API key; a POST request takes a slot of the key."""
        authorization = authorization_of(request)
        if request.method == "POST":
            request.lease = self.get_keys().admit(authorization)
        else:
            self.get_keys().check(authorization)


def _unwrapped(error: Exception) -> Exception:
    """Return an error of reading a body, which FastAPI wraps, or the error itself."""
    cause = error.__cause__ if isinstance(error, HTTPException) else None
    return cause if isinstance(cause, SpecdecError | ClientDisconnect) else error


class HandledRoute(APIRoute):
    """Route that passes through a handler.

    A body is read here, without FastAPI's dependencies; FastAPI describes it in /openapi.json. Such
    a route has nothing else that FastAPI would resolve: see `_require_plain`.
    """

    handler: ClassVar[RequestHandler]

    @property
    def model(self) -> type[RequestModel] | None:
        """The model of the body; None without a body, or where it may be left out."""
        kind = self.body_field.field_info.annotation if self.body_field else None
        return kind if isinstance(kind, type) and issubclass(kind, RequestModel) else None

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the function that answers a request which FastAPI has routed."""
        handler, handle, model = self.handler, self._handle(), self.model

        async def respond(request: Request) -> Response:
            own = ApiRequest(request.scope, request.receive)
            return await handler.respond(own, handle, model)

        return respond

    @property
    def direct(self) -> ASGIApp:
        """The application that answers a request without FastAPI."""
        handler, handle, model = self.handler, self._handle(), self.model

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            response = await handler.respond(ApiRequest(scope, receive), handle, model)
            await response(scope, receive, send)

        return app

    def _handle(self) -> RouteHandler:
        """Return the function that a request passes to, once it is admitted."""
        if self.model is None:
            handle: RouteHandler = super().get_route_handler()
        else:
            _require_plain(self)
            handle = _reading(self.model, self.endpoint)
        if self.handler.get_applications is not None:
            handle = _forwarding(handle, self.handler.get_applications)
        return handle


def answers(model: type[ResponseModel], events: str | None = None) -> dict[int | str, Any]:
    """Describe the responses of a route for /openapi.json. events: what the route can stream."""
    answer: dict[str, Any] = {"model": model, "description": "the answer"}
    if events is not None:  # the schema of one server-sent event, for OpenAPI 3.1
        data = {"type": "string", "contentMediaType": "application/json", "description": events}
        properties = {"data": data, "event": {"type": "string"}}
        schema = {"type": "object", "properties": properties, "required": ["data"]}
        answer["content"] = {"text/event-stream": {"schema": schema}}
    return {200: answer, **_ERRORS}


def _require_plain(route: APIRoute) -> None:
    """Assert that a route has no part that only FastAPI would evaluate."""
    assert route.methods == {"POST"}, "only POST requests with bodies pass by FastAPI"
    assert {*signature(route.endpoint).parameters} == {"body", "request"}, "it gets no others"
    kinds = {each.dependency for each in route.dependencies}
    assert kinds <= {declare_headers}, "no dependency is called"
    assert route.status_code is None, "the endpoint's response has the status"


def _reading(
    model: type[RequestModel], endpoint: Callable[..., Awaitable[Response]]
) -> RouteHandler:
    """Return a handler that reads the body for `endpoint`."""

    async def handle(request: ApiRequest) -> Response:
        body = await request.read(model)  # its errors have the client's names
        request.get_names = body.names
        return await endpoint(body=body, request=request)

    return handle


def direct_routes(*routers: APIRouter) -> dict[str, ASGIApp]:
    """Return the applications that answer a POST request by its path, without FastAPI."""
    return {
        route.path: route.direct
        for router in routers
        for route in router.routes
        if isinstance(route, HandledRoute) and route.model is not None
    }


def authorization_of(request: Request) -> str | None:
    """Return the header with the API key; Anthropic's clients send it as x-api-key."""
    key = request.headers.get("x-api-key")
    return request.headers.get("authorization", f"Bearer {key}" if key else None)


def _forwarding(
    handle: RouteHandler, get_applications: Callable[[], Applications | None]
) -> RouteHandler:
    """Wrap `handle`: forward to the application that serves the model and counts the request."""

    async def handle_or_forward(request: ApiRequest) -> Response:
        try:
            return await handle(request)
        except UnknownModelError as error:
            peer = await find_peer(get_applications(), request, error.requested)
            if peer is None:
                raise
            request.lease.undo()
            forwarded = ForwardedRequest.of(request, await request.body())
            return await cancel_on_disconnect(request, forward(peer, forwarded))

    return handle_or_forward


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
