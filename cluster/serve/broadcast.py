"""Orders to the replicas of an application: sent through Serve, and executed on each replica."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from cluster.api.base.operator_service import ReplicaOrders
from cluster.control.peers import ROUTER
from cluster.replica.orders import (
    AbortOrder,
    OrderResult,
    all_flushed,
    answers_of,
    reports_of,
    result_of,
)
from cluster.replica.replica_router import ReplicaRouter
from specdec.types.adapters import AdapterOrder, AdapterReport
from specdec.types.drafters import DrafterOrder, DrafterReport
from specdec.types.errors import InvalidValueError, NotReadyError
from specdec.types.reports.profile import ProfileOrder, ProfileReport
from specdec.types.samples import SampleBatch, SampleOrder


class Broadcast:
    """Sends orders to all replicas, each of which is a BroadcastReceiver."""

    def __init__(self, application: str, replica_id: str, router: ReplicaRouter) -> None:
        """router: of this replica, whose id is `replica_id`."""
        self._application = application
        self._replica_id = replica_id
        self._router = router

    @property
    def orders(self) -> ReplicaOrders:
        """The orders of operators."""
        return ReplicaOrders(
            profile=self.profile,
            drafter=self.order_drafter,
            adapter=self.order_adapter,
            take_samples=self.take_samples,
            abort=self.abort_requests,
            flush_caches=self.flush_caches,
        )

    async def profile(self, order: ProfileOrder) -> ProfileReport:
        """Profile this replica, or forward the order to the replica that it names.

        Raises the error of that replica, or InvalidValueError if no replica has the id or it was
        lost in the meantime.
        """
        if order.replica_id in ("", self._replica_id):
            return await self._router.profile(order)
        for result in await self._send("profile_if_addressed", order):
            if isinstance(result, ProfileReport):
                return result
            if isinstance(result, RayTaskError):
                raise result.cause from result
        limit = "the id of a replica, as shown by `specdec status`, or left out"
        raise InvalidValueError("replica_id", order.replica_id, limit)

    async def order_drafter(self, order: DrafterOrder) -> tuple[DrafterReport, ...]:
        """Execute an order on all replicas that it addresses, at once.

        Raises what `reports_of` raises.
        """
        results = await self._send("order_drafter_if_addressed", order)
        return reports_of(order, results, DrafterReport)

    async def order_adapter(self, order: AdapterOrder) -> tuple[AdapterReport, ...]:
        """Execute an order on all replicas that it addresses, at once.

        Raises what `reports_of` raises.
        """
        results = await self._send("order_adapter_if_addressed", order)
        return reports_of(order, results, AdapterReport)

    async def take_samples(self, order: SampleOrder) -> tuple[SampleBatch, ...]:
        """Take the samples of all replicas that the order addresses.

        Lost ones have none; an error of a replica is logged.
        """
        return tuple(answers_of(await self._send("take_samples_if_addressed", order), SampleBatch))

    async def abort_requests(self, order: AbortOrder) -> None:
        """End requests on all replicas; an error of a replica is logged."""
        answers_of(await self._send("abort_own_requests", order), type(None))

    async def flush_caches(self) -> bool:
        """Empty the prefix caches of all replicas without requests; return whether all were.

        Raises what `all_flushed` raises.
        """
        return all_flushed(await self._send("flush_own_cache"))

    async def _send(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of every replica; return the results, with the errors among them.

        Raises NotReadyError while Serve knows no replica, as in the first moment after a start.
        """
        handle = serve.get_deployment_handle(ROUTER, self._application)
        responses = handle.broadcast(method, *arguments)
        try:
            return list(await responses.results_async(return_exceptions=True))
        except (RayError, RayServeException) as error:
            message = "no replica can be reached: the service is starting or stopping"
            raise NotReadyError(message) from error


class BroadcastReceiver:
    """A replica: the methods that `Broadcast` calls by name. None stands for another's order."""

    router: ReplicaRouter
    _replica_id: str

    def _is_addressed(self, order: DrafterOrder | AdapterOrder | SampleOrder) -> bool:
        return order.replica_id in ("", self._replica_id)

    async def profile_if_addressed(self, order: ProfileOrder) -> ProfileReport | None:
        """Profile this replica if the order names it."""
        return await self.router.profile(order) if order.replica_id == self._replica_id else None

    async def order_drafter_if_addressed(
        self, order: DrafterOrder
    ) -> OrderResult[DrafterReport] | None:
        """Execute an order for the draft head."""
        if not self._is_addressed(order):
            return None
        return await result_of(self.router.order_drafter(order), self._replica_id, DrafterReport)

    async def order_adapter_if_addressed(
        self, order: AdapterOrder
    ) -> OrderResult[AdapterReport] | None:
        """Execute an order for the adapters."""
        if not self._is_addressed(order):
            return None
        return await result_of(self.router.order_adapter(order), self._replica_id, AdapterReport)

    async def take_samples_if_addressed(self, order: SampleOrder) -> SampleBatch | None:
        """Return samples of this replica, and forget them."""
        return self.router.take_samples(order) if self._is_addressed(order) else None

    async def abort_own_requests(self, order: AbortOrder) -> None:
        """End the requests of this replica that an order applies to."""
        self.router.abort(order)

    async def flush_own_cache(self) -> bool:
        """Empty the prefix cache of this replica, unless requests run or wait."""
        return await self.router.flush_cache()
