"""AdminService over HTTP: JSON under /v1/admin, for dashboards, scripts and curl."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from cluster.api.errors import status_of
from cluster.api.grpc.servicers import AdminServicer
from cluster.api.http.admin_json import read_change, read_profile_order, to_json
from cluster.api.http.csrf import require_own_page
from cluster.api.http.forwarding import ForwardedRequest, forward, is_forwarded
from cluster.control.peers import Fellow
from cluster.replica.limits import check_model
from specdec.types.control_changes import SpeculationState
from specdec.types.errors import InvalidValueError, NotReadyError, VersionConflictError
from specdec.types.fleet import FleetStatistics

MAX_BODY_BYTES = 64 * 1024
_JSON = "application/json"
_PRECONDITION_FAILED = 412

_Handler = Callable[[Request], Awaitable[Response]]


def admin_routes(get_admin: Callable[[], AdminServicer]) -> APIRouter:
    """The routes; `get_admin` is asked at each request, after start-up.

    `?model=` says which model they are about, where another than that of whoever answers.
    """
    router = APIRouter(prefix="/v1/admin")
    routes: tuple[tuple[str, str, Callable[[AdminServicer, Request], Awaitable[Response]]], ...] = (
        ("GET", "/speculation", _get_speculation),
        ("PUT", "/speculation", _put_speculation),
        ("POST", "/speculation/preview", _preview),
        ("GET", "/status", _status),
        ("GET", "/replicas", _replicas),
        ("GET", "/audit-log", _audit_log),
        ("GET", "/watch", _watch),
        ("POST", "/profile", _profile),
    )
    for method, path, handle in routes:
        router.add_api_route(path, _guarded(get_admin, handle), methods=[method])
    return router


def _guarded(
    get_admin: Callable[[], AdminServicer],
    handle: Callable[[AdminServicer, Request], Awaitable[Response]],
) -> _Handler:
    """Asks for the operators' token first, then whose page it is; turns errors into JSON."""

    async def respond(request: Request) -> Response:
        admin = get_admin()
        try:
            admin.access.check(request.headers.get("authorization"))
            if request.method != "GET":
                require_own_page(request)
            if (fellow := await _elsewhere(request, admin)) is not None:
                return await forward(fellow, ForwardedRequest.of(request, await _body(request)))
            return await handle(admin, request)
        except Exception as error:
            return error_response(error)

    return respond


async def _elsewhere(request: Request, admin: AdminServicer) -> Fellow | None:
    """Who serves the model that is named, if not this application. Raises UnknownModelError."""
    model = check_model(request.query_params.get("model", ""))
    if admin.applications is None or is_forwarded(request):
        return None
    return await admin.applications.elsewhere(model)


def error_response(error: Exception) -> Response:
    """{"error": {"message", and where it is about a field, "field", "value" and "limit"}}."""
    status = status_of(error)
    told: dict[str, Any] = {"message": status.message}
    if isinstance(error, InvalidValueError):
        told |= {"field": error.field, "value": error.value, "limit": error.limit}
    elif isinstance(error, VersionConflictError):
        told |= {"field": "expected_version", "value": error.expected, "limit": error.present}
    body = json.dumps({"error": told}, ensure_ascii=False, default=str)
    headers = dict(status.headers)
    if status.http_code == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(body, status.http_code, headers, _JSON)


async def _get_speculation(admin: AdminServicer, request: Request) -> Response:
    return _state_response(await admin.control.speculation())


async def _put_speculation(admin: AdminServicer, request: Request) -> Response:
    """If-Match holds the ETag of the state that the change was made for; 412 if it is another."""
    change = read_change(await _body(request))
    matched = _version_of(request.headers.get("if-match"))
    if matched is None:
        return _state_response(await admin.control.set_speculation(change))
    if change.expected_version not in (None, matched):
        limit = f"left out, or that of If-Match ({matched})"
        raise InvalidValueError("expected_version", change.expected_version, limit)
    try:
        change = replace(change, expected_version=matched)
        return _state_response(await admin.control.set_speculation(change))
    except VersionConflictError as error:
        response = error_response(error)
        response.status_code = _PRECONDITION_FAILED
        return response


async def _preview(admin: AdminServicer, request: Request) -> Response:
    """What a change would mean now; an empty one, what holds."""
    body = await _body(request)
    change = None if body.strip() == b"{}" else read_change(body)
    return Response(to_json(await admin.control.preview(change)), media_type=_JSON)


async def _status(admin: AdminServicer, request: Request) -> Response:
    return Response(to_json(await admin.control.status()), media_type=_JSON)


async def _replicas(admin: AdminServicer, request: Request) -> Response:
    replicas = (await admin.control.status()).replicas
    listed = ", ".join(map(to_json, replicas))
    return Response(f'{{"replicas": [{listed}]}}', media_type=_JSON)


async def _audit_log(admin: AdminServicer, request: Request) -> Response:
    page_size = _number(request, "page_size", int)
    page_token = request.query_params.get("page_token", "")
    page = await admin.control.audit_log(page_size, page_token)
    return Response(to_json(page), media_type=_JSON)


async def _watch(admin: AdminServicer, request: Request) -> Response:
    """Server-sent events: `stats` at each interval; a last `end` when the replica drains."""
    moments = admin.watches.watch(_number(request, "interval_s", float))
    first = await anext(moments)  # so that what is wrong gets a status of its own
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(
        _events(first, moments), headers=headers, media_type="text/event-stream"
    )


async def _profile(admin: AdminServicer, request: Request) -> Response:
    """Answers when the traces are written."""
    report = await admin.take_profile(read_profile_order(await _body(request)))
    return Response(to_json(report), media_type=_JSON)


async def _events(
    first: FleetStatistics, moments: AsyncGenerator[FleetStatistics, None]
) -> AsyncIterator[str]:
    try:
        yield _event("stats", to_json(first))
        async for fleet in moments:
            yield _event("stats", to_json(fleet))
    except NotReadyError as error:
        yield _event("end", json.dumps({"message": str(error)}))
    finally:
        await moments.aclose()


def _event(name: str, data: str) -> str:
    return f"event: {name}\ndata: {data}\n\n"


def _state_response(state: SpeculationState) -> Response:
    return Response(to_json(state), headers={"etag": f'"{state.version}"'}, media_type=_JSON)


async def _body(request: Request) -> bytes:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise InvalidValueError("body", "longer", f"at most {MAX_BODY_BYTES} bytes")
    return body


def _version_of(if_match: str | None) -> int | None:
    """The version in an ETag as it is given out; None where any will do."""
    if if_match is None or if_match.strip() == "*":
        return None
    tag = if_match.strip()
    number = tag[1:-1]
    if len(tag) < 3 or tag[0] + tag[-1] != '""' or not number.isdecimal() or len(number) > 18:
        raise InvalidValueError("If-Match", if_match, 'an ETag of this resource, such as "3", or *')
    return int(number)


def _number(request: Request, name: str, kind: type[int] | type[float]) -> Any:
    """A number of the query; 0 where it is left out."""
    text = request.query_params.get(name, "0")
    try:
        return kind(text)
    except ValueError as error:
        limit = "a whole number" if kind is int else "a number"
        raise InvalidValueError(name, text, limit) from error
