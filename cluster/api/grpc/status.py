"""Statuses of gRPC calls that fail, on Ray Serve's ingress and on our own.

Status codes are set, not raised, since both support that; only Serve drops a status that is set
after the last message of a stream.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from functools import partial
from inspect import isasyncgenfunction
from typing import Any, Final

from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from grpc import StatusCode, method_handlers_generic_handler

from cluster.api.base.errors import status_of
from protos.specdec.v1 import admin_pb2, inference_pb2
from specdec.types.deadline import TimeLimit
from specdec.types.errors import OverloadedError

_RESPONSES = {
    method.name: GetMessageClass(method.output_type)
    for file in (inference_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
}

MALFORMED_MESSAGE = "the request is no message of the type that this method takes"

WRITE_TIMEOUT_S = 20.0
"""Limit for a message of a stream to be sent. A client that does not read holds a sequence of the
engine; it gets the status after what it has not read, and may resume its stream."""

Handler = Callable[[Any, Any], Any]

_MALFORMED: Final = object()
"""Stands for a request that could not be decoded, between gRPC's decoding and the handler."""


class StreamFailedError(Exception):
    """Error that ends a stream on Serve's ingress; the status is in the context."""


def empty_response(method: Callable[..., Any]) -> Any:
    """Return what the RPC of this name returns with an error."""
    return _RESPONSES[method.__name__]()


def raise_on_serve(grpc_context: Any) -> None:
    """Raise at the end of a failed stream: Serve sends a status with a message or an exception."""
    serve = sys.modules.get("ray.serve.grpc_util")  # a process without Ray has no such context
    is_of_serve = serve is not None and isinstance(grpc_context, serve.RayServegRPCContext)
    if is_of_serve and grpc_context.code():
        raise StreamFailedError(grpc_context.details())


def hide_reported_statuses() -> None:
    """Keep Serve from logging a traceback for a call whose client gets the status, in this process.

    Serve raises and logs gRPCStatusError where a servicer has set a status and `raise_on_serve`
    has ended the stream.
    """
    logging.getLogger("ray.serve").addFilter(_is_no_reported_status)


def _is_no_reported_status(record: logging.LogRecord) -> bool:
    exceptions = sys.modules.get("ray.serve.exceptions")
    error = record.exc_info[1] if record.exc_info else None
    return exceptions is None or not isinstance(error, exceptions.gRPCStatusError)


@contextmanager
def reporting_to(
    grpc_context: Any, count: Callable[[StatusCode], None] | None = None
) -> Iterator[None]:
    """Turn an error into the status of the call; `count` is called with its code.

    What the client must not see is logged.
    """
    try:
        yield
    except StreamFailedError:  # a status has been set
        raise
    except Exception as error:
        status = status_of(error)
        if count is not None:
            count(status.grpc_code)
        grpc_context.set_code(status.grpc_code)
        grpc_context.set_details(status.message)
        grpc_context.set_trailing_metadata(list(status.trailing_metadata))  # Serve adds to it


class GenericServer:
    """Server, as generated code uses it, that registers no methods.

    grpc.aio waits for a call of every registered method, and begins this wait again after each
    call. Calls of methods that are not registered need one wait together.
    """

    def __init__(self, server: Any) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Add handlers."""
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Do nothing: generated code has added the same handlers."""


class DecodingServer(GenericServer):
    """Server that refuses malformed requests as INVALID_ARGUMENT.

    gRPC itself returns UNKNOWN with the text of an exception, as if the service had failed. On Ray
    Serve's proxy the handlers need `refuse_malformed` as well.
    """

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Do nothing: generated code adds the same handlers by name, which follows."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Add the handlers, without registering their methods."""
        wrapped = {name: _wrap(handler) for name, handler in handlers.items()}
        generic = method_handlers_generic_handler(service, wrapped)
        self._server.add_generic_rpc_handlers((generic,))


def refuse_malformed(
    handler: Handler,
    wrap_context: Callable[[Any], Any] = lambda grpc_context: grpc_context,
    finish: Callable[[Any], None] = lambda grpc_context: None,
) -> Handler:
    """Return a handler that aborts the call if the request could not be decoded.

    wrap_context: returns the context that `handler` gets. finish: called with grpc's own context
    when the handler has ended. A stream is written to the context, which takes the place of grpc's
    loop over a generator.
    """

    async def check(request: Any, grpc_context: Any) -> None:
        if request is _MALFORMED:
            await grpc_context.abort(StatusCode.INVALID_ARGUMENT, MALFORMED_MESSAGE)

    async def call(request: Any, grpc_context: Any) -> Any:
        await check(request, grpc_context)
        response = await handler(request, wrap_context(grpc_context))
        finish(grpc_context)
        return response

    async def stream(request: Any, grpc_context: Any) -> None:
        await check(request, grpc_context)
        if await _send(handler(request, wrap_context(grpc_context)), grpc_context):
            finish(grpc_context)

    return stream if isasyncgenfunction(handler) else call


async def _send(messages: AsyncGenerator[Any, None], grpc_context: Any) -> bool:
    """Send a stream; set the status and return False if the client does not read in time."""
    async with aclosing(messages):
        has_begun = False
        async for message in messages:
            write = _write if has_begun else partial(_write_first, messages)
            if not await write(message, grpc_context):
                break
            has_begun = True
        else:
            return True
    with reporting_to(grpc_context):
        raise OverloadedError(f"the client has not read its stream for {WRITE_TIMEOUT_S:g} s")
    return False


async def _write_first(
    messages: AsyncGenerator[Any, None], message: Any, grpc_context: Any
) -> bool:
    """Send the first message; return False if the client does not read it in time.

    This write is not cancelled: grpc.aio would send the headers again with the status, which gRPC
    refuses, so that the call would not end. At its limit `messages` are closed, which frees the
    engine, and the write ends when the client reads on, at the latest with the connection.
    """
    closing = list[asyncio.Task[None]]()
    timer = asyncio.get_running_loop().call_later(
        WRITE_TIMEOUT_S, lambda: closing.append(asyncio.ensure_future(messages.aclose()))
    )
    try:
        await grpc_context.write(message)
    finally:
        timer.cancel()
        await asyncio.gather(*closing)
    return not closing


async def _write(message: Any, grpc_context: Any) -> bool:
    """Send a message; return False if the client does not read in time."""
    try:
        with TimeLimit(WRITE_TIMEOUT_S, TimeoutError):
            await grpc_context.write(message)
    except TimeoutError:
        return False
    return True


def _wrap(handler: Any) -> Any:
    kind = "unary_stream" if handler.response_streaming else "unary_unary"

    def decode(content: bytes) -> Any:
        try:
            return handler.request_deserializer(content)
        except DecodeError:
            return _MALFORMED

    wrapped = {kind: refuse_malformed(getattr(handler, kind))}
    return handler._replace(request_deserializer=decode, **wrapped)
