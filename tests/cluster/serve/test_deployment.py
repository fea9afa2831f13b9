"""The Router as a Serve deployment."""

from types import SimpleNamespace

import pytest

from cluster.replica.orders import AbortOrder
from cluster.serve import deployment
from cluster.serve.deployment import RouterReplica
from specdec.types.errors import NotReadyError
from specdec.types.request import Caller


async def test_a_replica_can_be_deleted_before_its_constructor_has_returned():
    incomplete = SimpleNamespace(_is_complete=RouterReplica._is_complete)
    await RouterReplica.__del__(incomplete)


class Replicas:
    """Stands for the handle of a deployment, whose replicas answer a broadcast in this process."""

    def __init__(self, *routers):
        self.routers = routers

    def broadcast(self, method, *arguments):
        async def results_async(return_exceptions):
            assert return_exceptions
            return [await self._call(router, method, arguments) for router in self.routers]

        return SimpleNamespace(results_async=results_async)

    async def _call(self, router, method, arguments):
        try:
            return await getattr(RouterReplica, method)(SimpleNamespace(router=router), *arguments)
        except NotReadyError as error:
            return error


class CacheAlone:
    def __init__(self, is_flushed):
        self.is_flushed = is_flushed

    async def flush_cache(self):
        if self.is_flushed is None:
            raise NotReadyError("the model is still loading")
        return self.is_flushed


@pytest.fixture
def broadcast_to(monkeypatch):
    def answer(*routers):
        monkeypatch.setattr(
            deployment.serve, "get_deployment_handle", lambda *names: Replicas(*routers)
        )
        return SimpleNamespace(_application="app")

    return answer


async def test_requests_are_aborted_on_every_replica(broadcast_to):
    aborted = []
    routers = [SimpleNamespace(abort=lambda order: aborted.append(order)) for _ in range(2)]
    order = AbortOrder("mine", Caller("ann"))
    await RouterReplica._abort_requests(broadcast_to(*routers), order)
    assert aborted == [order, order]


async def test_the_caches_of_all_replicas_are_flushed_together(broadcast_to):
    for flushed in ((True, True), (True, False)):
        replica = broadcast_to(*map(CacheAlone, flushed))
        assert await RouterReplica._flush_caches(replica) == all(flushed)
    with pytest.raises(NotReadyError, match="a replica did not answer"):
        await RouterReplica._flush_caches(broadcast_to(CacheAlone(True), CacheAlone(None)))
