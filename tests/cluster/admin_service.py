"""AdminService on a real server, a real ControlClient and a ControlPlane in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import grpc

from cluster.api.base.authentication import AdminAccess, ApiKeys
from cluster.api.base.operator_service import OperatorService, ReplicaOrders
from cluster.api.grpc.servicers import AdminServicer, add_admin_service
from cluster.control.client import ControlClient, StatsStreams
from cluster.control.plane import ControlPlane
from cluster.replica.orders import AbortOrder
from specdec.client import (
    AdapterInfo,
    AdapterOrder,
    AdapterReport,
    DrafterOrder,
    DrafterReport,
    DrafterVersion,
    OperationTime,
    ProfileOrder,
    ProfileReport,
    ReplicaReport,
    SampleBatch,
    SampleOrder,
    ServedSample,
    SpeculationState,
    WorkerProfile,
)
from specdec.types.adapters import AdapterState
from specdec.types.drafters import VersionState
from specdec.types.errors import InvalidValueError, UnknownModelError
from specdec.types.reports.stats import SpeculationStats


class LocalHandle:
    """Calls an object as a Serve handle calls a deployment.

    plane: None for one that answers no call. Its clients time out after `silent_s`: a limit of
    their own that is as short would also end calls that a busy machine delays.
    """

    def __init__(self, plane: ControlPlane | None, silent_s: float = 0.3) -> None:
        self.plane = plane
        self.silent_s = silent_s

    def __getattr__(self, name: str) -> Any:
        return _Method(self, name)


class _Method:
    def __init__(self, handle: LocalHandle, name: str) -> None:
        self._handle = handle
        self._name = name

    def remote(self, *arguments: Any, **named: Any) -> asyncio.Task[Any]:
        return asyncio.create_task(self._call(*arguments, **named))

    async def _call(self, *arguments: Any, **named: Any) -> Any:
        if self._handle.plane is None:
            await asyncio.sleep(self._handle.silent_s)
            raise TimeoutError
        return await getattr(self._handle.plane, self._name)(*arguments, **named)


async def take_profile(order: ProfileOrder) -> ProfileReport:
    """Return the profile of a Router with two models, without taking one."""
    operations = (
        OperationTime("step", order.num_steps, 1.5, 20.25, 0.0),
        OperationTime("aten::mm", 70, 0.5, 0.5, 12.0),
    )
    target = WorkerProfile("target", 0, order.num_steps, "/traces/t.json.gz", 999, operations)
    fault = "the trace is larger than 5 bytes"
    return ProfileReport(
        order.replica_id or "r1", 2.5, (target, WorkerProfile("draft model", 0, 3, fault=fault))
    )


class Drafters:
    """Replicas r1 and r2 with versions of a head, without ranks; `orders` are those received."""

    def __init__(self) -> None:
        self.orders: list[DrafterOrder] = []

    async def __call__(self, order: DrafterOrder) -> tuple[DrafterReport, ...]:
        self.orders.append(order)
        if order.version > 2:
            raise InvalidValueError("version", order.version, "one of 1, 2")
        first, second = SpeculationStats(100, 300, 120), SpeculationStats(0, 0, 0)
        state = VersionState.ACTIVE if order.path else VersionState.ROLLED_BACK
        versions = (
            DrafterVersion(1, "head", VersionState.READY, first, 60),
            DrafterVersion(2, order.path or "other", state, second, 0),
        )
        reports = (
            DrafterReport("r1", versions, order.is_pinned or False, 1),
            DrafterReport("r2", fault="version is 7; it must be 1"),
        )
        return tuple(each for each in reports if order.replica_id in ("", each.replica_id))


class Adapters:
    """Replicas r1 and r2 with the adapter `sql`, without ranks; `orders` are those received.

    fault: why r2 does not execute orders.
    """

    def __init__(self) -> None:
        self.orders: list[AdapterOrder] = []
        self.fault = ""

    async def __call__(self, order: AdapterOrder) -> tuple[AdapterReport, ...]:
        self.orders.append(order)
        if order.name and not order.loads and order.name != "sql":
            raise UnknownModelError(order.name, "sql")
        if order.name == "sql" and order.loads and not order.replaces:
            raise InvalidValueError("lora_name", "sql", "a name that no loaded adapter has")
        drafts = SpeculationStats(100, 300, 120)
        adapters = [AdapterInfo("sql", "org/sql", 16, AdapterState.READY, 2, 500, drafts)]
        if order.loads:
            adapters.append(
                AdapterInfo(
                    order.name, order.path, 8, AdapterState.READY, draft_source=order.draft_path
                )
            )
        elif order.name:
            adapters = [replace(adapters[0], state=AdapterState.UNLOADING)]
        reports = (AdapterReport("r1", tuple(adapters)), AdapterReport("r2", fault=self.fault))
        return tuple(each for each in reports if order.replica_id in ("", each.replica_id))


async def take_samples(order: SampleOrder) -> tuple[SampleBatch, ...]:
    """Return a sample of each of two replicas."""
    sample = ServedSample((5, 6, 7, 8), 2, 0.8)
    batches = (SampleBatch("r1", (sample,), 100, 3), SampleBatch("r2", (sample,) * 2))
    return tuple(each for each in batches if order.replica_id in ("", each.replica_id))


async def abort(order: AbortOrder) -> None:
    """End no request."""


async def flush_caches() -> bool:
    """Empty no cache."""
    return True


def operator_service(
    control: ControlClient,
    access: AdminAccess | None = None,
    drafters: Drafters | None = None,
    adapters: Adapters | None = None,
) -> OperatorService:
    """Return the service of two replicas without models: r1, and r2."""
    orders = ReplicaOrders(
        take_profile,
        drafters or Drafters(),
        adapters or Adapters(),
        take_samples,
        abort,
        flush_caches,
    )
    streams = StatsStreams(control.fleet)
    return OperatorService(control, access or AdminAccess(), streams, orders)


async def _ignore(state: SpeculationState) -> None:
    """Apply nothing."""


@contextmanager
def running_admin_service(
    handle: LocalHandle,
    report: ReplicaReport,
    token: str | None = None,
    keys: ApiKeys | None = None,
    drafters: Drafters | None = None,
    adapters: Adapters | None = None,
) -> Iterator[str]:
    """Serve on an event loop in a thread; yield the address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(10)

    access, drafters = AdminAccess(token, keys), drafters or Drafters()
    server, port = run(_start(handle, report, access, drafters, adapters or Adapters()))
    try:
        yield f"127.0.0.1:{port}"
    finally:
        run(server.stop(0))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _start(
    handle: LocalHandle,
    report: ReplicaReport,
    access: AdminAccess,
    drafters: Drafters,
    adapters: Adapters,
) -> tuple[Any, int]:
    server = grpc.aio.server()
    link = ControlClient(handle, _ignore, lambda: report)
    operators = operator_service(link, access, drafters, adapters)
    add_admin_service(AdminServicer(operators), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, port
