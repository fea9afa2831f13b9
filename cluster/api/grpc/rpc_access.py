"""Access control of RPCs: which credential a call needs, and what it occupies while it runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any, NamedTuple

from grpc import StatusCode

from cluster.api.base.authentication import AdminAccess, ApiKeys, Lease
from cluster.api.grpc.forwarding import Forwarding
from cluster.api.grpc.status import empty_response, reporting_to
from cluster.control.peers import Applications
from cluster.observability.request_context import (
    current_address,
    current_headers,
    network_of_peer,
)
from protos.specdec.v1 import admin_pb2
from protos.specdec.v1 import inference_pb2 as pb
from specdec.types.errors import UnauthenticatedError

_INFERENCE = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
SERVICE_NAMES = (_INFERENCE, _ADMIN)


class Access(NamedTuple):
    """Access control of a servicer's RPCs.

    enter: returns a context manager that holds what the call occupies, or raises. count_failure:
    counts the status of a failed call.
    """

    enter: Callable[[Any, Any], AbstractContextManager[Any]]  # of servicer and context of a call
    count_failure: Callable[[Any, StatusCode], None]


def authorization(grpc_context: Any) -> str | None:
    """Return the credential of a call, None where it has none."""
    return _authorization_in(grpc_context.invocation_metadata())


def _authorization_in(metadata: Any) -> str | None:
    """Return the last credential in the metadata of a call."""
    found = None
    for name, value in metadata or ():
        if name == "authorization":
            found = value
    return found


def admit(servicer: Any, grpc_context: Any) -> Lease:
    """Take a place of the client's key, as calls that run the model do."""
    return servicer.keys.admit(authorization(grpc_context))  # type: ignore[no-any-return]


def check_token(servicer: Any, grpc_context: Any) -> AbstractContextManager[None]:
    """Check the credential of an operator; the call occupies nothing."""
    servicer.operators.access.check(authorization(grpc_context))
    return nullcontext()


def _check_key(servicer: Any, grpc_context: Any) -> AbstractContextManager[None]:
    servicer.keys.check(authorization(grpc_context))
    return nullcontext()


def _count_failure(servicer: Any, code: StatusCode) -> None:
    servicer.router.metrics.count_failure(code)


ADMITTED = Access(admit, _count_failure)
BY_KEY = Access(_check_key, _count_failure)
BY_TOKEN = Access(check_token, lambda servicer, code: None)  # metrics are about requests


def has_access(keys: ApiKeys, admin: AdminAccess, method: str, metadata: Any) -> bool:
    """Return whether a call of a method, by its full name, has the credential that it needs.

    The servicers check it again: for what a call occupies, and the status that it gets.
    """
    check = {_INFERENCE: keys.check, _ADMIN: admin.check}.get(method.split("/")[1])
    credential = _authorization_in(metadata)
    try:
        if check is not None:
            check(credential)
    except UnauthenticatedError:
        return False
    return True


def unary(access: Access) -> Callable[[Callable[..., Awaitable[Any]]], Any]:
    """Check access to an RPC; return an empty response with the status of an error."""

    def decorate(method: Callable[..., Awaitable[Any]]) -> Any:
        @wraps(method)
        async def call(servicer: Any, request: Any, grpc_context: Any) -> Any:
            keep_metadata(grpc_context)
            with (
                reporting_to(grpc_context, partial(access.count_failure, servicer)),
                access.enter(servicer, grpc_context),
                servicer.budget.hold(request.ByteSize()),
            ):
                return await method(servicer, request, grpc_context)
            return empty_response(method)

        return call

    return decorate


def forward(servicer: Any, applications: Applications | None, access: Access, file: Any) -> None:
    """Mount forwarding on the RPCs of the services in `file` if there are other applications."""
    if applications is None:
        return
    forwarding = Forwarding(
        applications,
        partial(access.enter, servicer),
        partial(access.count_failure, servicer),
        servicer.budget,
    )
    for service in file.services_by_name.values():
        forwarding.mount(servicer, [method.name for method in service.methods])


def keep_metadata(grpc_context: Any) -> None:
    """Keep headers and address of a call for what runs in its context."""
    current_headers.set(lambda: grpc_context.invocation_metadata() or ())
    current_address.set(lambda: network_of_peer(grpc_context.peer()))
