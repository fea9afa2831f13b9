"""Running service whose speculation settings are changed before each measurement."""

from __future__ import annotations

import time

from benchmarks.contenders import ServiceContender
from benchmarks.workloads import Measurement, Workload
from specdec.client import AdminClient
from specdec.types.control import SpeculationChange

STEERED = "as steered"
"""Method of a workload whose requests leave the decision to the service."""

_IN_FORCE_TIMEOUT_S = 10.0
_POLL_S = 0.05


class SteeredContender:
    """Service with given speculation settings, so that several settings can take turns."""

    def __init__(self, address: str, admin: AdminClient, change: SpeculationChange) -> None:
        self._service = ServiceContender(address)
        self._admin = admin
        self._change = change

    def measure(self, workload: Workload) -> Measurement:
        """Apply the settings, and run the workload once all replicas have them."""
        steer(self._admin, self._change)
        return self._service.measure(workload)


def steer(admin: AdminClient, change: SpeculationChange) -> None:
    """Apply a change and wait until it is in force on all replicas. Raises TimeoutError."""
    version = admin.set_speculation(change).version
    deadline = time.monotonic() + _IN_FORCE_TIMEOUT_S
    while any(replica.report.speculation_version != version for replica in admin.replicas()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"version {version} is not in force after {_IN_FORCE_TIMEOUT_S} s")
        time.sleep(_POLL_S)
