"""How a gRPC call ends with an error, on Ray Serve's ingress and on our own.

Status codes are set, not raised: that is the way of reporting that both understand, except that
Serve drops what is set after the last message of a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from grpc import StatusCode
from ray.serve.grpc_util import RayServegRPCContext

from cluster.api.errors import status_of


class StreamFailedError(Exception):
    """Ends a stream on Serve's ingress; its status is in the context."""


def raise_on_serve(grpc_context: Any) -> None:
    """At the end of a stream: Serve sends a status with a message or after an exception only."""
    if isinstance(grpc_context, RayServegRPCContext) and grpc_context.code():
        raise StreamFailedError(grpc_context.details())


@contextmanager
def reporting_to(
    grpc_context: Any, count: Callable[[StatusCode], None] | None = None
) -> Iterator[None]:
    """Turns an error into the status of the call, and counts it where it is to be counted.

    What a caller must not see goes to the log.
    """
    try:
        yield
    except Exception as error:
        status = status_of(error)
        if count is not None:
            count(status.grpc_code)
        grpc_context.set_code(status.grpc_code)
        grpc_context.set_details(status.message)
        grpc_context.set_trailing_metadata(list(status.trailing_metadata))  # Serve adds to it
