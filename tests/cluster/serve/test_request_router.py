"""The request routers, in Ray Serve's own class with replicas that are not real."""

import pytest
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve._private.utils import generate_request_id
from ray.serve.request_router import PendingRequest

from cluster.api.base.routing_hint import RoutingHint
from cluster.serve.request_router import (
    KV_CACHE_TOKENS,
    PrefixRequestRouter,
    RandomRequestRouter,
    request_router_config,
)

DEPLOYMENT = DeploymentID("Router", "app")
LONG = b"What is the shortest path between these towns? " * 50


class Replica:
    """Stands for Serve's wrapper of a running replica."""

    max_ongoing_requests = 100

    def __init__(self, name, **stats):
        self.replica_id, self.routing_stats = ReplicaID(name, DEPLOYMENT), stats

    async def get_queue_len(self, *, deadline_s):
        return 0


@pytest.fixture
async def router():
    """A router with two replicas; Serve's gauges need no Ray."""
    made = PrefixRequestRouter(DEPLOYMENT, DeploymentHandleSource.UNKNOWN)
    made.update_replicas([Replica("a"), Replica("b")])
    return made


def request_of(prompt=None, session_id=""):
    if prompt is not None:
        session_id = RoutingHint.of(("m",), prompt, 16).encode()
    metadata = RequestMetadata("id", generate_request_id(), session_id=session_id)
    return PendingRequest([], {}, metadata)


async def choose(router, request):
    ranks = await router.choose_replicas(list(router.curr_replicas.values()), request)
    return [[each.replica_id.unique_id for each in rank] for rank in ranks]


async def test_a_prefix_returns_to_its_replica_and_the_others_are_second(router):
    first, rest = await choose(router, request_of(LONG))
    assert {*first, *rest} == {"a", "b"}
    assert await choose(router, request_of(LONG + b"more")) == [first, rest]
    assert await choose(router, request_of(b"Else. " + LONG)) == [rest, first]


@pytest.mark.parametrize("session_id", ["", "of-the-client"])
async def test_without_a_hint_serve_compares_two_random_replicas(router, session_id):
    assert sorted(*await choose(router, request_of(session_id=session_id))) == ["a", "b"]
    assert len(*await choose(router, None)) == 2


async def test_a_moved_request_counts_where_it_was_sent(router):
    request = request_of(LONG)
    (chosen,), (other,) = await choose(router, request)
    router.on_request_routed(request, ReplicaID(other, DEPLOYMENT), None)
    assert (await choose(router, request_of(b"Else. " + LONG)))[0] == [chosen]


async def test_the_end_of_a_request_counts_at_the_replica_that_has_it(router, monkeypatch):
    ended, request = [], request_of(LONG)
    (chosen,), (other,) = await choose(router, request)
    monkeypatch.setattr(router._chooser, "end", ended.append)
    request_id = request.metadata.internal_request_id
    router.on_request_completed(ReplicaID(other, DEPLOYMENT), request_id)  # it had rejected it
    assert ended == []
    router.on_request_completed(ReplicaID(chosen, DEPLOYMENT), request_id)
    assert ended == [request_id]


async def test_a_dead_replica_is_not_chosen(router):
    (chosen,), (other,) = await choose(router, request_of(LONG))
    router.on_replica_actor_died(ReplicaID(chosen, DEPLOYMENT))
    assert await choose(router, request_of(LONG)) == [[other], []]


async def test_the_capacity_of_a_cache_is_a_routing_statistic(router):
    first, rest = await choose(router, request_of(LONG))
    router.update_replicas([Replica(name, **{KV_CACHE_TOKENS: 64}) for name in "ab"])
    chosen = [await choose(router, request_of(LONG + bytes([i]))) for i in range(6)]
    assert [first, rest] in chosen
    assert [rest, first] in chosen, "the prefix fits into no cache"


async def test_the_policy_selects_the_router():
    classes = {
        policy: request_router_config(policy).request_router_class
        for policy in ("prefix", "power_of_two", "random")
    }
    assert classes["prefix"].endswith("PrefixRequestRouter")
    assert classes["random"].endswith("RandomRequestRouter")
    assert "PowerOfTwo" in classes["power_of_two"]


async def test_random_choice_uses_every_replica():
    made = RandomRequestRouter(DEPLOYMENT, DeploymentHandleSource.UNKNOWN)
    made.update_replicas([Replica("a"), Replica("b")])
    chosen = {str(await choose(made, request_of(LONG))) for _ in range(64)}
    assert len(chosen) == 2  # missed once in 2**63 runs
