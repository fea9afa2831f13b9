"""The conversation with a proxy about one HTTP request: a state machine without I/O.

An endpoint is chosen once the request's body is known, or at its headers where the proxy sends no
whole body. In the mode FULL_DUPLEX_STREAMED the answer to the headers waits for the body, and the
parts of the body are returned to the proxy; the other modes have an answer for each message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from google.protobuf.json_format import MessageToDict

from cluster.api.base.byte_budget import ByteBudget
from cluster.api.base.routing_hint import MAX_READ_BYTES, RoutingHint, read_fields
from cluster.api.endpoint_picker.choice import UNREAD, PickRequest
from cluster.api.endpoint_picker.pool import Pick, Pool
from protos.ext_proc import external_processor_pb2 as pb
from specdec.types.errors import NotReadyError, OverloadedError
from specdec.types.sampling.sampling_params import MAX_CHOICES

DESTINATION = "x-gateway-destination-endpoint"
"""Header, and key of the metadata, with the chosen endpoint."""

_SUBSET_NAMESPACE, _SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
_NAMESPACE, _SERVED = "envoy.lb", "x-gateway-destination-endpoint-served"
_MAX_CHUNK_BYTES = 62 * 2**10  # Envoy recommends at most 64 KiB
_RETRY_AFTER_S = 1

_FAILURES = ("500", "502", "503")
"""Statuses of a replica that fails, and of a proxy without a connection to it. Clients cause 501
and 504, with unsupported paths and their time limits; scrapes find a replica that hangs."""

_BATCH_FIELDS = ("prompt", "text", "input_ids")
"""The fields that may be lists of prompts."""


def read_request(body: bytes) -> PickRequest:
    """Return what the choice needs of a body; of an unreadable one nothing is known."""
    fields = read_fields(body)
    if fields is None:
        return PickRequest()
    model = fields.get("model")
    hint = RoutingHint.of_fields(fields)
    return PickRequest(
        hint or UNREAD, model if isinstance(model, str) else "", num_choices=_num_streams(fields)
    )


def _num_streams(fields: Mapping[str, Any]) -> int:
    """Return the choices of all prompts, within their limits: the endpoint refuses others."""
    params = fields.get("sampling_params")
    if isinstance(params, list):  # those of each prompt
        return max(1, sum(map(_num_choices, params[:MAX_CHOICES])))
    return _num_prompts(fields) * _num_choices(params if isinstance(params, dict) else fields)


def _num_prompts(fields: Mapping[str, Any]) -> int:
    given = next((fields[name] for name in _BATCH_FIELDS if fields.get(name)), None)
    is_batch = isinstance(given, list) and isinstance(given[0], str | list)
    return min(len(given), MAX_CHOICES) if is_batch and given else 1


def _num_choices(params: Any) -> int:
    number = params.get("n") if isinstance(params, dict) else None
    return max(1, min(number, MAX_CHOICES)) if isinstance(number, int) else 1


class Exchange:
    """One HTTP request and its response."""

    def __init__(self, pool: Pool, budget: ByteBudget) -> None:
        """budget: of the bodies that all exchanges hold back."""
        self._pool = pool
        self._held = budget.hold()
        self._pick: Pick | None = None
        self._is_refused = self._has_begun = self._is_whole = False
        self._mode = self._response_mode = pb.FULL_DUPLEX_STREAMED
        self._subset: frozenset[str] | None = None
        self._body = bytearray()  # held back until the choice

    def answer(self, message: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        """Return the answers to a message of the proxy, in order."""
        part = message.WhichOneof("request")
        if part is None or self._is_refused or message.observability_mode:
            return []
        if message.HasField("protocol_config"):
            self._mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        self._is_whole |= _ends_request(message)
        return self._unless_refused(lambda: _HANDLERS[part](self, message))

    @property
    def may_end(self) -> bool:
        """Return whether the proxy has all that it needs: the choice, and the request's body."""
        return self._is_refused or (self._is_whole and not self._body)

    @property
    def returns_parts(self) -> bool:
        """Return whether the proxy sends on only those parts of the response that it gets back."""
        return self._response_mode == pb.FULL_DUPLEX_STREAMED

    @property
    def is_waiting(self) -> bool:
        """Return whether a part of the body is held back, until the rest or `release`."""
        may_choose = self._has_begun and self._pick is None and not self._is_refused
        return may_choose and self._mode == pb.FULL_DUPLEX_STREAMED

    def release(self) -> list[pb.ProcessingResponse]:
        """Choose without the rest of the body; return the part of it that was held back."""
        return self._unless_refused(lambda: self._release(is_end=False))

    def break_off(self) -> list[pb.ProcessingResponse]:
        """End the response where the proxy has a part of it at most, with an error or a reset."""
        if self._is_refused or not self.returns_parts:
            return []
        return [self._refuse(503, "service_unavailable", "the endpoint picker stops")]

    def _unless_refused(
        self, answer: Callable[[], list[pb.ProcessingResponse]]
    ) -> list[pb.ProcessingResponse]:
        """Return the answers, or the refusal where there is no endpoint to choose."""
        try:
            return answer()
        except NotReadyError as error:
            return [self._refuse(503, "service_unavailable", str(error))]
        except OverloadedError as error:
            return [self._refuse(429, "rate_limit_exceeded", str(error))]

    def close(self) -> None:
        """End the request, if the response has not."""
        self._take_body()
        if self._pick is not None:
            self._pick.end()

    def _request_headers(self, message: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        if pb.GRPC in (self._mode, self._response_mode):
            text = (
                "the endpoint picker does not support the body mode GRPC; use FULL_DUPLEX_STREAMED"
            )
            return [self._refuse(500, "unsupported_body_mode", text)]
        self._has_begun = True
        self._subset = _subset(message.metadata_context)
        if not message.request_headers.end_of_stream:
            if self._mode == pb.FULL_DUPLEX_STREAMED:
                return []
            if self._mode == pb.BUFFERED:
                return [_without_destination()]
        return [self._headers_with(self._choose())]

    def _request_body(self, message: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        part = message.request_body
        if self._mode == pb.BUFFERED:
            common, metadata = _destination(self._choose(part.body))
            body = pb.BodyResponse(response=common)
            return [pb.ProcessingResponse(request_body=body, dynamic_metadata=metadata)]
        if self._mode != pb.FULL_DUPLEX_STREAMED:
            return [pb.ProcessingResponse(request_body=pb.BodyResponse())]
        self._body += part.body
        if self._pick is None and not part.end_of_stream and self._may_hold():
            return []
        return self._release(is_end=part.end_of_stream)

    def _request_trailers(self, message: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        trailers = pb.ProcessingResponse(request_trailers=pb.TrailersResponse())
        if self._mode != pb.FULL_DUPLEX_STREAMED:
            if self._pick is None:  # no body came before them; headers cannot be changed any more
                trailers.dynamic_metadata.update(_destination(self._choose())[1])
            return [trailers]
        return [*self._release(is_end=False), trailers]

    def _response_headers(self, message: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        if self._pick is not None:
            self._note_response(self._pick, message)
        if message.response_headers.end_of_stream:
            self.close()
        return [pb.ProcessingResponse(response_headers=pb.HeadersResponse())]

    def _response_body(self, message: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        part = message.response_body
        if part.end_of_stream:
            self.close()
        if self._response_mode != pb.FULL_DUPLEX_STREAMED:
            return [pb.ProcessingResponse(response_body=pb.BodyResponse())]
        bodies = _streamed(part.body, is_end=part.end_of_stream)
        return [pb.ProcessingResponse(response_body=each) for each in bodies]

    def _response_trailers(self, message: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        self.close()
        return [pb.ProcessingResponse(response_trailers=pb.TrailersResponse())]

    def _choose(self, body: bytes = b"") -> Pick:
        if self._pick is not None:
            self._pick.end()
        self._pick = self._pool.pick(read_request(body), self._subset)
        return self._pick

    def _headers_with(self, pick: Pick) -> pb.ProcessingResponse:
        common, metadata = _destination(pick)
        headers = pb.HeadersResponse(response=common)
        return pb.ProcessingResponse(request_headers=headers, dynamic_metadata=metadata)

    def _may_hold(self) -> bool:
        """Return whether more of the body can be held back; otherwise it stays unread."""
        if len(self._body) > MAX_READ_BYTES:
            return False
        try:
            self._held.grow_to(len(self._body))
        except OverloadedError:
            return False
        return True

    def _take_body(self) -> bytes:
        """Return the part of the body that was held back, and hold nothing."""
        body = bytes(self._body)
        self._body.clear()
        self._held.__exit__()
        return body

    def _release(self, *, is_end: bool) -> list[pb.ProcessingResponse]:
        """Return the part of the body that was held back, after the headers if they were too."""
        body, headers = self._take_body(), []
        if self._pick is None:
            headers = [self._headers_with(self._choose(body))]
        bodies = _streamed(body, is_end=is_end)
        return headers + [pb.ProcessingResponse(request_body=each) for each in bodies]

    def _note_response(self, pick: Pick, message: pb.ProcessingRequest) -> None:
        """Count failures of the endpoint, and find the one that has served the request."""
        now_s = self._pool.clock()
        served = _text(_metadata(message.metadata_context, _NAMESPACE).get(_SERVED))
        endpoint = self._pool.get(served)
        if endpoint is not None and endpoint is not pick.endpoint:
            pick.endpoint.respond(has_failed=True, now_s=now_s)
            pick.move(endpoint)
        status = _header(message.response_headers.headers, ":status")
        pick.endpoint.respond(has_failed=status in _FAILURES, now_s=now_s)

    def _refuse(self, status: int, code: str, text: str) -> pb.ProcessingResponse:
        self._is_refused = True
        self.close()
        error = {"message": text, "type": "server_error", "param": None, "code": code}
        headers = {"content-type": "application/json", "retry-after": str(_RETRY_AFTER_S)}
        return pb.ProcessingResponse(
            immediate_response=pb.ImmediateResponse(
                status=pb.HttpStatus(code=status),
                headers=_set_headers(headers),
                body=json.dumps({"error": error}).encode(),
                details=f"endpoint_picker_{code}",
            )
        )


_HANDLERS = {
    "request_headers": Exchange._request_headers,
    "request_body": Exchange._request_body,
    "request_trailers": Exchange._request_trailers,
    "response_headers": Exchange._response_headers,
    "response_body": Exchange._response_body,
    "response_trailers": Exchange._response_trailers,
}
"""By the part of a message."""


def _ends_request(message: pb.ProcessingRequest) -> bool:
    """Return whether nothing of the request follows."""
    part = message.WhichOneof("request")
    if part in ("request_headers", "request_body"):
        return bool(getattr(message, part).end_of_stream)
    return True


def _without_destination() -> pb.ProcessingResponse:
    """Return an answer to headers that removes a client's own choice: there may be none of ours."""
    removal = pb.HeaderMutation(remove_headers=[DESTINATION])
    headers = pb.HeadersResponse(response=pb.CommonResponse(header_mutation=removal))
    return pb.ProcessingResponse(request_headers=headers)


def _destination(pick: Pick) -> tuple[pb.CommonResponse, dict[str, Any]]:
    """Return the changes of a request and the metadata that both name the endpoint."""
    addresses = ",".join((pick.endpoint.address, *pick.fallbacks))
    common = pb.CommonResponse(
        header_mutation=_set_headers({DESTINATION: addresses}), clear_route_cache=True
    )
    return common, {_NAMESPACE: {DESTINATION: addresses}}


def _set_headers(headers: Mapping[str, str]) -> pb.HeaderMutation:
    return pb.HeaderMutation(
        set_headers=[
            pb.HeaderValueOption(
                header=pb.HeaderValue(key=name, raw_value=value.encode()),
                append_action=pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
            )
            for name, value in headers.items()
        ]
    )


def _streamed(body: bytes, *, is_end: bool) -> Iterable[pb.BodyResponse]:
    """Yield parts of a body; an empty one too where it ends there."""
    starts = range(0, len(body), _MAX_CHUNK_BYTES) or ([0] if is_end else [])
    for start in starts:
        chunk = body[start : start + _MAX_CHUNK_BYTES]
        is_last = is_end and start + _MAX_CHUNK_BYTES >= len(body)
        streamed = pb.StreamedBodyResponse(body=chunk, end_of_stream=is_last)
        mutation = pb.BodyMutation(streamed_response=streamed)
        yield pb.BodyResponse(response=pb.CommonResponse(body_mutation=mutation))


def _subset(metadata: pb.Metadata) -> frozenset[str] | None:
    """Return the addresses to choose from, a list or a text with commas; None without a hint."""
    hint = _metadata(metadata, _SUBSET_NAMESPACE)
    if _SUBSET not in hint:
        return None
    value = hint[_SUBSET]
    values = value if isinstance(value, list) else [value]
    return frozenset(part.strip() for each in values for part in _text(each).split(","))


def _metadata(metadata: pb.Metadata, namespace: str) -> dict[str, Any]:
    """Return the entries of a namespace as Python values."""
    if namespace not in metadata.filter_metadata:
        return {}
    return MessageToDict(metadata.filter_metadata[namespace])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _header(headers: pb.HeaderMap, name: str) -> str:
    for each in headers.headers:
        if each.key == name:
            return each.raw_value.decode("latin-1") or each.value
    return ""
