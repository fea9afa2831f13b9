"""Statuses of gRPC calls that fail, on Ray Serve's ingress and on our own.

Status codes are set, not raised, since both support that; only Serve drops a status that is set
after the last message of a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from google.protobuf.message_factory import GetMessageClass
from grpc import StatusCode
from ray.serve.grpc_util import RayServegRPCContext

from cluster.api.errors import status_of
from protos.specdec.v1 import admin_pb2, inference_pb2

_RESPONSES = {
    method.name: GetMessageClass(method.output_type)
    for file in (inference_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
}


class StreamFailedError(Exception):
    """Error that ends a stream on Serve's ingress; the status is in the context."""


def empty_response(method: Callable[..., Any]) -> Any:
    """Return what the RPC of this name returns with an error."""
    return _RESPONSES[method.__name__]()


def raise_on_serve(grpc_context: Any) -> None:
    """Raise at the end of a failed stream: Serve sends a status with a message or an exception."""
    if isinstance(grpc_context, RayServegRPCContext) and grpc_context.code():
        raise StreamFailedError(grpc_context.details())


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
