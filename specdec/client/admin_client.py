"""A blocking client for operators."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

from protos.specdec.v1 import admin_pb2 as pb
from protos.specdec.v1.admin_pb2_grpc import AdminServiceStub
from specdec.client.attempts import Attempts
from specdec.client.codec import admin as codec
from specdec.client.connection import BlockingConnection, Destination
from specdec.types.adapters import AdapterOrder, AdapterReport
from specdec.types.control import (
    DEFAULT_AUDIT_PAGE,
    AuditPage,
    SpeculationChange,
    SpeculationState,
)
from specdec.types.drafters import DrafterOrder, DrafterReport
from specdec.types.reports.fleet import FleetStatistics, ReplicaStatus, ServiceStatus
from specdec.types.reports.profile import ProfileOrder, ProfileReport
from specdec.types.samples import SampleBatch, SampleOrder

DEFAULT_ADMIN_TIMEOUT_S = 10.0
_PROFILE_WRITING_S = 90.0
"""A replica waits up to a minute for its models to write their traces."""
_STALL_S = 30.0
_LOADING_S = 150.0
"""A replica waits up to two minutes for its ranks to load a head or an adapter."""


class AdminClient(BlockingConnection):
    """Blocking client of AdminService: the state of a service, and changes of it.

    Every call raises ClientError when it fails. A context manager; thread-safe.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float | None = DEFAULT_ADMIN_TIMEOUT_S,
        tls_ca_file: Path | str | None = None,
        tls_server_name: str | None = None,
        token: str | None = None,
        model: str = "",
    ) -> None:
        """Arguments and errors are those of `Destination`.

        token: of the operators, if the service requires one. model: which one all calls refer to,
        if several are served; empty: the model of the replica that answers.
        """
        super().__init__(Destination(address, timeout_s, tls_ca_file, token, tls_server_name))
        self._stub = AdminServiceStub(self._channel)
        self._model = model

    def get_speculation(self) -> SpeculationState:
        """Return the speculation settings, and who made them."""
        response = self._call(self._stub.GetSpeculation, pb.GetSpeculationRequest())
        return codec.STATE.decode(response.state)

    def set_speculation(self, change: SpeculationChange) -> SpeculationState:
        """Change the settings of every replica within a second, and return the new state."""
        response = self._call(self._stub.SetSpeculation, codec.CHANGE.encode(change))
        return codec.STATE.decode(response.state)

    def status(self) -> ServiceStatus:
        """Return every replica with its load, and the speculation settings."""
        return codec.STATUS.decode(self._call(self._stub.GetStatus, pb.GetStatusRequest()))

    def replicas(self) -> tuple[ReplicaStatus, ...]:
        """Return every replica with its load."""
        response = self._call(self._stub.ListReplicas, pb.ListReplicasRequest())
        return tuple(map(codec.REPLICA.decode, response.replicas))

    def audit_log(self, page_size: int = DEFAULT_AUDIT_PAGE, page_token: str = "") -> AuditPage:
        """Return a page of the changes of speculation settings, the newest first."""
        request = pb.ListAuditLogRequest(page_size=page_size, page_token=page_token)
        return codec.AUDIT_PAGE.decode(self._call(self._stub.ListAuditLog, request))

    def profile(self, order: ProfileOrder | None = None) -> ProfileReport:
        """Profile the next steps of the models of a replica. No order: the defaults.

        Waits for the steps and for the traces to be written, regardless of `timeout_s`.
        """
        order = order or ProfileOrder()
        response = self._call(
            self._stub.Profile,
            codec.PROFILE_ORDER.encode(order),
            timeout_s=order.timeout_s + _PROFILE_WRITING_S,
        )
        return codec.PROFILE.decode(response)

    def drafters(self) -> tuple[DrafterReport, ...]:
        """Return the versions of the draft head of every replica."""
        response = self._call(self._stub.ListDrafters, pb.ListDraftersRequest())
        return tuple(map(codec.DRAFTERS.decode, response.replicas))

    def set_drafter(self, order: DrafterOrder) -> tuple[DrafterReport, ...]:
        """Change the version of the draft head in use, and return the replicas' versions.

        Waits for the ranks to load it, regardless of `timeout_s`.
        """
        request = codec.DRAFTER_ORDER.encode(order)
        response = self._call(self._stub.SetDrafter, request, timeout_s=_LOADING_S)
        return tuple(map(codec.DRAFTERS.decode, response.replicas))

    def adapters(self) -> tuple[AdapterReport, ...]:
        """Return the LoRA adapters of every replica."""
        response = self._call(self._stub.ListAdapters, pb.ListAdaptersRequest())
        return tuple(map(codec.ADAPTERS.decode, response.replicas))

    def load_adapter(self, order: AdapterOrder) -> tuple[AdapterReport, ...]:
        """Load an adapter, and return the replicas' adapters.

        Waits for the ranks to load it, regardless of `timeout_s`. order: see `AdapterOrder.load`.
        """
        request = codec.ADAPTER_LOAD.encode(order)
        response = self._call(self._stub.LoadAdapter, request, timeout_s=_LOADING_S)
        return tuple(map(codec.ADAPTERS.decode, response.replicas))

    def unload_adapter(self, name: str, replica_id: str = "") -> tuple[AdapterReport, ...]:
        """Refuse further requests for an adapter, and return the replicas' adapters.

        replica_id: empty for all replicas.
        """
        request = pb.UnloadAdapterRequest(name=name, replica_id=replica_id)
        response = self._call(self._stub.UnloadAdapter, request)
        return tuple(map(codec.ADAPTERS.decode, response.replicas))

    def take_samples(self, order: SampleOrder | None = None) -> tuple[SampleBatch, ...]:
        """Return answers of requests that allow training; the replicas forget them."""
        request = codec.SAMPLE_ORDER.encode(order or SampleOrder())
        response = self._call(self._stub.TakeSamples, request)
        return tuple(map(codec.SAMPLES.decode, response.replicas))

    def watch(self, interval_s: float = 1.0) -> Generator[FleetStatistics, None, None]:
        """Yield statistics of the service now and every `interval_s` seconds, without a time limit.

        Raises ClientError when the replica that answers drains, and after 30 s without the
        statistics that are due.
        """
        request = pb.WatchStatsRequest(interval_s=interval_s, model=self._model)
        stall_s = max(0, interval_s) + _STALL_S  # the service refuses NaN, which is 0 here
        messages = self._messages(self._stub.WatchStats, request, Attempts(None, ()), stall_s)
        with closing(messages) as responses:
            yield from map(codec.FLEET.decode, responses)

    def _is_repeatable(self, request: Any) -> bool:
        name: str = request.DESCRIPTOR.name
        return name.startswith(("Get", "List"))

    def _call(self, method: Any, request: Any, timeout_s: float | None = None) -> Any:
        request.model = self._model
        return super()._call(method, request, timeout_s)
