"""The service for operators, shared by every interface: gRPC, HTTP, dashboard and SGLang's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cluster.api.base.authentication import AdminAccess
from cluster.control.client import ControlClient, StatsStreams
from cluster.control.peers import Applications
from cluster.replica.orders import AbortOrder
from specdec.types.adapters import AdapterOrder, AdapterReport
from specdec.types.drafters import DrafterOrder, DrafterReport
from specdec.types.reports.profile import ProfileOrder, ProfileReport
from specdec.types.samples import SampleBatch, SampleOrder


@dataclass(frozen=True)
class ReplicaOrders:
    """Functions that execute orders on all replicas, or on the one that an order names.

    profile: of this replica where the order names none. flush_caches: returns whether every cache
    was emptied.
    """

    profile: Callable[[ProfileOrder], Awaitable[ProfileReport]]
    drafter: Callable[[DrafterOrder], Awaitable[tuple[DrafterReport, ...]]]
    adapter: Callable[[AdapterOrder], Awaitable[tuple[AdapterReport, ...]]]
    take_samples: Callable[[SampleOrder], Awaitable[tuple[SampleBatch, ...]]]
    abort: Callable[[AbortOrder], Awaitable[None]]
    flush_caches: Callable[[], Awaitable[bool]]


@dataclass(frozen=True)
class OperatorService:
    """The fleet as its operators see it: settings and statistics, orders, and access to both.

    control: settings, status and audit log, of the ControlPlane. applications: those that serve
    other models; None where there can be none.
    """

    control: ControlClient
    access: AdminAccess
    stats_streams: StatsStreams
    orders: ReplicaOrders
    applications: Applications | None = None
