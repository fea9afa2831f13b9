"""Orders to the replicas of an application, down to methods of RouterReplica."""

from types import SimpleNamespace

import pytest
from ray.serve.exceptions import DeploymentUnavailableError

from cluster.replica.orders import AbortOrder
from cluster.serve import broadcast
from cluster.serve.broadcast import Broadcast
from cluster.serve.deployment import RouterReplica
from specdec.types.errors import InvalidValueError, NotReadyError
from specdec.types.reports.profile import ProfileOrder, ProfileReport
from specdec.types.request import Caller


class Replica(RouterReplica):
    """A replica that nothing has started, and that has nothing to end."""

    def __init__(self, number, router):
        self.router, self._replica_id, self._ingress = router, f"r{number}", None

    def __del__(self):
        pass


class Replicas:
    """Stands for the handle of a deployment, whose replicas answer a broadcast in this process."""

    def __init__(self, *routers):
        self.replicas = [Replica(*each) for each in enumerate(routers, 1)]

    def broadcast(self, method, *arguments):
        async def results_async(return_exceptions):
            assert return_exceptions
            return [await self._call(replica, method, arguments) for replica in self.replicas]

        return SimpleNamespace(results_async=results_async)

    async def _call(self, replica, method, arguments):
        try:
            return await getattr(replica, method)(*arguments)
        except NotReadyError as error:
            return error


class CacheAlone:
    def __init__(self, is_flushed):
        self.is_flushed = is_flushed

    async def flush_cache(self):
        if self.is_flushed is None:
            raise NotReadyError("the model is still loading")
        return self.is_flushed


class Profiled:
    def __init__(self, name):
        self.name = name

    async def profile(self, order):
        return ProfileReport(self.name, 1.0, ())


@pytest.fixture
def orders_to(monkeypatch):
    """Return the orders of the replica r1, which has the first of the routers."""

    def orders(*routers):
        handle = Replicas(*routers)
        monkeypatch.setattr(broadcast.serve, "get_deployment_handle", lambda *names: handle)
        return Broadcast("app", "r1", routers[0]).orders

    return orders


async def test_requests_are_aborted_on_every_replica(orders_to):
    aborted = []
    routers = [SimpleNamespace(abort=lambda order: aborted.append(order)) for _ in range(2)]
    order = AbortOrder("mine", Caller("ann"))
    await orders_to(*routers).abort(order)
    assert aborted == [order, order]


async def test_the_caches_of_all_replicas_are_flushed_together(orders_to):
    for flushed in ((True, True), (True, False)):
        assert await orders_to(*map(CacheAlone, flushed)).flush_caches() == all(flushed)
    with pytest.raises(NotReadyError, match="a replica did not answer"):
        await orders_to(CacheAlone(True), CacheAlone(None)).flush_caches()


async def test_orders_are_refused_for_a_retry_while_serve_knows_no_replica(monkeypatch):
    async def results_async(return_exceptions):
        raise DeploymentUnavailableError("Router")

    responses = SimpleNamespace(results_async=results_async)
    handle = SimpleNamespace(broadcast=lambda *call: responses)
    monkeypatch.setattr(broadcast.serve, "get_deployment_handle", lambda *names: handle)
    orders = Broadcast("app", "r1", CacheAlone(True)).orders
    for order in (orders.flush_caches(), orders.abort(AbortOrder("mine", Caller("ann")))):
        with pytest.raises(NotReadyError, match="starting or stopping"):
            await order


async def test_a_profile_is_taken_of_the_replica_that_the_order_names(orders_to):
    orders = orders_to(Profiled("first"), Profiled("second"))
    for replica_id, name in (("", "first"), ("r1", "first"), ("r2", "second")):
        report = await orders.profile(ProfileOrder(3, 10.0, replica_id=replica_id))
        assert report.replica_id == name
    with pytest.raises(InvalidValueError, match="the id of a replica"):
        await orders.profile(ProfileOrder(3, 10.0, replica_id="r3"))
