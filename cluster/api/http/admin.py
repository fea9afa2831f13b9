"""AdminService over HTTP: JSON under /v1/admin, for dashboards, scripts and curl."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from fastapi import APIRouter, Request, Response

from cluster.api.base.errors import status_of
from cluster.api.base.openai_errors import failure_of
from cluster.api.base.operator_service import OperatorService
from cluster.api.base.sse import event, event_response, json_event
from cluster.api.http.admin_json import (
    read_adapter_order,
    read_change,
    read_drafter_order,
    read_load,
    read_profile_order,
    read_unload,
    replicas_json,
    to_json,
)
from cluster.api.http.forwarding import ForwardedRequest, find_peer, forward
from cluster.api.http.origin import require_own_reader, require_same_origin
from cluster.control.client import StatsStreams
from cluster.replica.limits import check_model
from specdec.config.fields import refuse_unknown_fields
from specdec.types.adapters import AdapterOrder
from specdec.types.control import SpeculationState
from specdec.types.drafters import DrafterOrder
from specdec.types.errors import (
    BodyTooLargeError,
    InvalidValueError,
    NotReadyError,
    VersionConflictError,
)
from specdec.types.reports.fleet import FleetStatistics

MAX_BODY_BYTES = 64 * 1024
_JSON = "application/json"
_PRECONDITION_FAILED = 412
_PARAMETERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"/audit-log": ("page_size", "page_token"), "/watch": ("interval_s",)}
)
"""Names in the query string of routes that have any, beside `model`."""

_Handler = Callable[[OperatorService, Request], Awaitable[Response]]


def admin_routes(get_admin: Callable[[], OperatorService]) -> APIRouter:
    """Return the routes; `get_admin` is called for each request.

    `?model=` selects the model; without it, the one of the application that receives the request.
    """
    router = APIRouter(prefix="/v1/admin")
    routes: Mapping[str, Mapping[str, _Handler]] = {
        "/speculation": {"GET": _get_speculation, "PUT": _put_speculation},
        "/speculation/preview": {"POST": _preview},
        "/status": {"GET": _status},
        "/replicas": {"GET": _replicas},
        "/audit-log": {"GET": _audit_log},
        "/watch": {"GET": _watch},
        "/profile": {"POST": _profile},
        "/drafters": {"GET": _drafters, "POST": _order_drafter},
        "/adapters": {"GET": _adapters, "POST": _order_adapter},
    }
    for path, handlers in routes.items():  # one route a path, whose methods an error 405 lists
        parameters = ("model", *_PARAMETERS.get(path, ()))
        handle = partial(_by_method, handlers, parameters)
        respond = _guarded(get_admin, handle, error_response)
        router.add_api_route(path, respond, methods=[*handlers])
    return router


async def _by_method(
    handlers: Mapping[str, _Handler],
    parameters: Sequence[str],
    admin: OperatorService,
    request: Request,
) -> Response:
    refuse_unknown_fields(request.query_params, parameters)
    return await handlers[request.method](admin, request)


def lora_routes(get_admin: Callable[[], OperatorService]) -> APIRouter:
    """Return vLLM's routes to load and unload adapters, for operators as `admin_routes`.

    Errors are in the format of the OpenAI API, as in vLLM.
    """
    router = APIRouter(prefix="/v1")
    routes = (
        ("/load_lora_adapter", read_load, "loaded"),
        ("/unload_lora_adapter", read_unload, "unloaded"),
    )
    for path, read, done in routes:
        handle = partial(_execute_adapter_order, read, done)
        respond = _guarded(get_admin, handle, lambda error: failure_of(error).respond())
        router.add_api_route(path, respond, methods=["POST"])
    return router


def _guarded(
    get_admin: Callable[[], OperatorService],
    handle: _Handler,
    failed: Callable[[Exception], Response],
) -> Callable[[Request], Awaitable[Response]]:
    """Check the operators' token, then the origin. failed: returns the response of an error."""

    async def respond(request: Request) -> Response:
        admin = get_admin()
        try:
            admin.access.check(request.headers.get("authorization"))
            if request.method == "GET":
                require_own_reader(request)
            else:
                require_same_origin(request)
            model = check_model(request.query_params.get("model", ""))
            peer = await find_peer(admin.applications, request, model)
            if peer is None:
                return await handle(admin, request)
            return await forward(peer, ForwardedRequest.of(request, await _body(request)))
        except Exception as error:
            return failed(error)

    return respond


def error_response(error: Exception) -> Response:
    """Return {"error": {"message"}}, with "field", "value" and "limit" for an invalid field."""
    status = status_of(error)
    details: dict[str, Any] = {"message": status.message}
    if isinstance(error, InvalidValueError):
        details |= {"field": error.field, "value": _shown(error.value), "limit": error.limit}
    elif isinstance(error, VersionConflictError):
        details |= {"field": "expected_version", "value": error.expected, "limit": error.present}
    body = json.dumps({"error": details}, ensure_ascii=False, default=str)
    return Response(body, status.http_code, status.headers, _JSON)


def _shown(value: Any) -> Any:
    """Return a value as it is if JSON has it, as it has no NaN and no infinity; else its text."""
    try:
        json.dumps(value, default=str, allow_nan=False)
    except ValueError:
        return str(value)
    return value


async def _get_speculation(admin: OperatorService, request: Request) -> Response:
    return _state_response(await admin.control.speculation())


async def _put_speculation(admin: OperatorService, request: Request) -> Response:
    """Change the state. Respond 412 if If-Match is not the ETag of the present state."""
    change = read_change(await _body(request))
    matched = _version_of(request.headers.get("if-match"))
    if matched is None:
        return _state_response(await admin.control.set_speculation(change))
    if change.expected_version not in (None, matched):
        limit = f"left out, or the version in If-Match ({matched})"
        raise InvalidValueError("expected_version", change.expected_version, limit)
    try:
        change = replace(change, expected_version=matched)
        return _state_response(await admin.control.set_speculation(change))
    except VersionConflictError as error:
        response = error_response(error)
        response.status_code = _PRECONDITION_FAILED
        return response


async def _preview(admin: OperatorService, request: Request) -> Response:
    """Return the effect that a change would have now; for an empty change, the present state."""
    body = await _body(request)
    change = None if body.strip() == b"{}" else read_change(body)
    return Response(to_json(await admin.control.preview(change)), media_type=_JSON)


async def _status(admin: OperatorService, request: Request) -> Response:
    return Response(to_json(await admin.control.status()), media_type=_JSON)


async def _replicas(admin: OperatorService, request: Request) -> Response:
    status = await admin.control.status()
    return Response(replicas_json(status.replicas), media_type=_JSON)


async def _audit_log(admin: OperatorService, request: Request) -> Response:
    page_size = _number(request, "page_size", int)
    page_token = request.query_params.get("page_token", "")
    page = await admin.control.audit_log(page_size, page_token)
    return Response(to_json(page), media_type=_JSON)


async def _watch(admin: OperatorService, request: Request) -> Response:
    """Stream server-sent events: `stats` at each interval, and `end` when the replica drains."""
    moments = admin.stats_streams.watch(_number(request, "interval_s", float))
    first = await anext(moments)  # an error here still sets the status code
    return event_response(_events(admin.stats_streams, first, moments))


async def _profile(admin: OperatorService, request: Request) -> Response:
    """Take a profile and respond when the traces are written."""
    report = await admin.orders.profile(read_profile_order(await _body(request)))
    return Response(to_json(report), media_type=_JSON)


async def _drafters(admin: OperatorService, request: Request) -> Response:
    reports = await admin.orders.drafter(DrafterOrder())
    return Response(replicas_json(reports), media_type=_JSON)


async def _order_drafter(admin: OperatorService, request: Request) -> Response:
    """Change the version of the draft head; respond when it is in use."""
    reports = await admin.orders.drafter(read_drafter_order(await _body(request)))
    return Response(replicas_json(reports), media_type=_JSON)


async def _adapters(admin: OperatorService, request: Request) -> Response:
    return Response(replicas_json(await admin.orders.adapter(AdapterOrder())), media_type=_JSON)


async def _order_adapter(admin: OperatorService, request: Request) -> Response:
    """Load or unload an adapter; respond when it can be used, or no longer."""
    reports = await admin.orders.adapter(read_adapter_order(await _body(request)))
    return Response(replicas_json(reports), media_type=_JSON)


async def _execute_adapter_order(
    read: Callable[[bytes], AdapterOrder], done: str, admin: OperatorService, request: Request
) -> Response:
    """Execute an order of vLLM's form; respond with a line of text, as vLLM does.

    Raise NotReadyError with the first fault where only some replicas have executed it.
    """
    order = read(await _body(request))
    reports = await admin.orders.adapter(order)
    fault = next((each for each in reports if each.fault), None)
    if fault is not None:
        raise NotReadyError(f"replica {fault.replica_id} has not {done} it: {fault.fault}")
    return Response(f"Success: LoRA adapter '{order.name}' {done}.", media_type="text/plain")


def _stats_event(fleet: FleetStatistics) -> bytes:
    return event(to_json(fleet), "stats")


async def _events(
    streams: StatsStreams, first: FleetStatistics, moments: AsyncGenerator[FleetStatistics, None]
) -> AsyncGenerator[bytes, None]:
    try:
        yield streams.encoded(first, _stats_event)
        async for fleet in moments:
            yield streams.encoded(fleet, _stats_event)
    except NotReadyError as error:
        yield json_event("end", {"message": str(error)})
    finally:
        await moments.aclose()


def _state_response(state: SpeculationState) -> Response:
    return Response(to_json(state), headers={"etag": f'"{state.version}"'}, media_type=_JSON)


async def _body(request: Request) -> bytes:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise BodyTooLargeError(MAX_BODY_BYTES)
    return body


def _version_of(if_match: str | None) -> int | None:
    """Parse the version in an ETag of this service; return None if any version matches."""
    if if_match is None or if_match.strip() == "*":
        return None
    tag = re.fullmatch(r'"(\d{1,18})"', if_match.strip())
    if tag is None:
        raise InvalidValueError("If-Match", if_match, 'an ETag of this resource, such as "3", or *')
    return int(tag[1])


def _number(request: Request, name: str, kind: type[int] | type[float]) -> Any:
    """Parse a number of the query string; return 0 if it is left out."""
    text = request.query_params.get(name, "0")
    try:
        return kind(text)
    except ValueError as error:
        limit = "a whole number" if kind is int else "a number"
        raise InvalidValueError(name, text, limit) from error
