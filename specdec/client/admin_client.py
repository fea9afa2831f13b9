"""A client for operators, which blocks."""

from __future__ import annotations

from pathlib import Path

from protos.specdec.v1 import admin_pb2 as pb
from protos.specdec.v1.admin_pb2_grpc import AdminServiceStub
from specdec.client import admin_codec as codec
from specdec.client.admin_messages import ServiceStatus, SpeculationChange, SpeculationState
from specdec.client.connection import Connection

DEFAULT_ADMIN_TIMEOUT_S = 10.0


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
    ) -> None:
        """Arguments and errors are those of Connection."""
        super().__init__(address, timeout_s=timeout_s, tls_ca_file=tls_ca_file)
        self._stub = AdminServiceStub(self._channel)

    def get_speculation(self) -> SpeculationState:
        """What is wanted of speculation, and who wanted it."""
        with self._reported():
            request = pb.GetSpeculationRequest()
            response = self._stub.GetSpeculation(request, timeout=self.timeout_s)
            return codec.decode_state(response.state)

    def set_speculation(self, change: SpeculationChange) -> SpeculationState:
        """Changes it on every replica within a second, and returns what is in force then."""
        request = codec.encode_change(change)
        with self._reported():
            response = self._stub.SetSpeculation(request, timeout=self.timeout_s)
            return codec.decode_state(response.state)

    def status(self) -> ServiceStatus:
        """Every replica with its load, and what is wanted of speculation."""
        with self._reported():
            response = self._stub.GetStatus(pb.GetStatusRequest(), timeout=self.timeout_s)
            return codec.decode_status(response)
