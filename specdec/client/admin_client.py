"""A client for operators, which blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from protos.specdec.v1 import admin_pb2 as pb
from protos.specdec.v1.admin_pb2_grpc import AdminServiceStub
from specdec.client import admin_codec as codec
from specdec.client.connection import Connection, Destination
from specdec.types.control_changes import (
    DEFAULT_AUDIT_PAGE,
    AuditPage,
    SpeculationChange,
    SpeculationState,
)
from specdec.types.fleet import FleetStatistics, ReplicaStatus, ServiceStatus
from specdec.types.profile import ProfileOrder, ProfileReport

DEFAULT_ADMIN_TIMEOUT_S = 10.0
_PROFILE_WRITING_S = 90.0
"""A replica gives its models a minute to write their traces."""


class AdminClient(Connection):
    """Shows how a service runs, and changes what may be changed meanwhile.

    Every call raises ClientError when it fails. A context manager; thread-safe.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float | None = DEFAULT_ADMIN_TIMEOUT_S,
        tls_ca_file: Path | None = None,
        tls_server_name: str | None = None,
        token: str | None = None,
        model: str = "",
    ) -> None:
        """Arguments and errors are those of `Destination`.

        token: of the operators, where the service wants one. model: that it is all about, where
        several are served; empty: that of whoever answers.
        """
        super().__init__(Destination(address, timeout_s, tls_ca_file, token, tls_server_name))
        self._stub = AdminServiceStub(self._channel)
        self._model = model

    def get_speculation(self) -> SpeculationState:
        """What is wanted of speculation, and who wanted it."""
        response = self._call(self._stub.GetSpeculation, pb.GetSpeculationRequest())
        return codec.decode_state(response.state)

    def set_speculation(self, change: SpeculationChange) -> SpeculationState:
        """Changes it on every replica within a second, and returns what is in force then."""
        response = self._call(self._stub.SetSpeculation, codec.encode_change(change))
        return codec.decode_state(response.state)

    def status(self) -> ServiceStatus:
        """Every replica with its load, and what is wanted of speculation."""
        return codec.decode_status(self._call(self._stub.GetStatus, pb.GetStatusRequest()))

    def replicas(self) -> tuple[ReplicaStatus, ...]:
        """Every replica with its load."""
        response = self._call(self._stub.ListReplicas, pb.ListReplicasRequest())
        return tuple(map(codec.decode_replica, response.replicas))

    def audit_log(self, page_size: int = DEFAULT_AUDIT_PAGE, page_token: str = "") -> AuditPage:
        """A page of the changes of speculation, the newest first."""
        request = pb.ListAuditLogRequest(page_size=page_size, page_token=page_token)
        return codec.decode_audit_page(self._call(self._stub.ListAuditLog, request))

    def profile(self, order: ProfileOrder | None = None) -> ProfileReport:
        """Records the next steps of the models of a replica. No order: the defaults.

        Waits for them, and for the traces to be written, whatever this client's `timeout_s` is.
        """
        order = order or ProfileOrder()
        response = self._call(
            self._stub.Profile,
            codec.encode_profile_order(order),
            timeout_s=order.timeout_s + _PROFILE_WRITING_S,
        )
        return codec.decode_profile(response)

    def watch(self, interval_s: float = 1.0) -> Iterator[FleetStatistics]:
        """The service as it is now, and again every `interval_s` seconds, without end.

        It ends with ClientError when the replica that answers drains. Without a time limit.
        """
        with self._destination.reported():
            request = pb.WatchStatsRequest(interval_s=interval_s, model=self._model)
            for response in self._stub.WatchStats(request, metadata=self._destination.metadata):
                yield codec.decode_fleet(response)

    def _call(self, method: Any, request: Any, timeout_s: float | None = None) -> Any:
        request.model = self._model
        with self._destination.reported():
            return method(
                request, timeout=timeout_s or self.timeout_s, metadata=self._destination.metadata
            )
