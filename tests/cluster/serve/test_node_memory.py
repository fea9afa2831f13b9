"""Memory of a replica's nodes, and the replicas that share them, with a fake of Ray."""

from types import SimpleNamespace

import pytest

from cluster.config.serve_config import ServeConfig
from cluster.control.peers import ROUTER
from cluster.serve import node_memory
from cluster.serve.node_memory import (
    NodeShares,
    node_shares,
    replica_memory,
)
from cluster.workers.ray.resources import ReplicaMemory, placement_bundles
from specdec.config.speculation.speculative import SpeculativeConfig

GIB = 2**30
HERE, THERE = 12 * GIB, 6 * GIB
ALONE = NodeShares(1, 1)


@pytest.fixture
def placed(monkeypatch):
    """Return a function that computes the memory of a replica with bundles on these nodes.

    The driver is on node `a`; the function also returns the remote queries.
    """
    queries = []

    def remote(function=None, **_):
        if function is None:
            return remote
        return SimpleNamespace(options=lambda **options: query(options))

    def query(options):
        strategy = options["scheduling_strategy"]
        queries.append((strategy.placement_group_bundle_index, options.get("num_gpus", 0)))
        return SimpleNamespace(remote=lambda: THERE)

    ray = SimpleNamespace(
        remote=remote,
        get=lambda value, timeout: value,
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "a"),
    )
    monkeypatch.setattr(node_memory, "ray", ray)
    monkeypatch.setattr(node_memory, "available_memory_bytes", lambda: HERE)

    def place(config, *nodes, shares=ALONE):
        table = {"bundles_to_node_id": dict(enumerate(nodes))}
        monkeypatch.setattr(node_memory, "placement_group_table", lambda placement: table)
        placement = SimpleNamespace(bundle_specs=placement_bundles(config))
        queries.clear()
        return replica_memory(config, placement, shares), list(queries)

    return place


def config_of(device="cpu", **settings):
    settings.setdefault("speculative_config", SpeculativeConfig.of("draft_model"))
    return ServeConfig(model="tiny", device=device, **settings)


def test_one_node_needs_no_remote_query(placed):
    assert placed(config_of(), "a", "a", "a") == (ReplicaMemory(HERE), [])
    assert placed(config_of(), "a", "a", "a", shares=NodeShares(3, 2)) == (
        ReplicaMemory(HERE // 3),
        [],
    )


def test_the_node_of_the_draft_model_is_queried(placed):
    assert placed(config_of(), "a", "a", "b") == (ReplicaMemory(HERE, THERE), [(2, 0)])
    memory, _ = placed(config_of(), "a", "a", "b", shares=NodeShares(1, 4))
    assert memory == ReplicaMemory(HERE, THERE // 4)


def test_target_and_draft_on_one_remote_node_share_its_memory(placed):
    assert placed(config_of(), "a", "b", "b") == (ReplicaMemory(THERE), [(1, 0)])


def test_gpu_memory_is_queried_and_not_divided(placed):
    config = config_of("cuda", tensor_parallel_size=4, gpu_memory_utilization=0.5)
    memory, queries = placed(config, "a", "a", "a", shares=NodeShares(3, 3))
    assert memory == ReplicaMemory(THERE // 2, THERE // 2)
    assert queries == [(1, 4), (2, 1)]


def test_models_that_share_a_gpu_have_one_memory(placed):
    speculation = SpeculativeConfig.of("draft_model", share_gpu=True)
    config = config_of("cuda", speculative_config=speculation, gpu_memory_utilization=0.5)
    memory, queries = placed(config, "a", "b", "b")
    assert memory == ReplicaMemory(THERE // 2)
    assert queries == [(1, 0.5)]


PACKED = {"tensor_parallel_size": 2, "target_placement": "pack"}


def test_ranks_on_two_nodes_have_equal_parts_of_the_smaller(placed):
    """A rank needs as much on each node, and a draft rank beside one has its own part."""
    alone = config_of(speculative_config=None, **PACKED)
    assert placed(alone, "a", "a", "b") == (ReplicaMemory(2 * THERE), [(2, 0)])
    assert placed(alone, "a", "a", "a") == (ReplicaMemory(HERE), [])
    memory, _ = placed(config_of(**PACKED), "a", "a", "b", "b")
    assert memory == ReplicaMemory(2 * (THERE // 2), THERE // 2)
    memory, _ = placed(config_of(**PACKED), "a", "a", "b", "a", shares=NodeShares(2, 3))
    assert memory == ReplicaMemory(THERE, HERE // 2 // 3)


def test_the_gpu_of_each_rank_is_queried_where_each_has_a_bundle(placed):
    memory, queries = placed(config_of("cuda", **PACKED), "a", "a", "b", "b")
    assert memory == ReplicaMemory(int(THERE * 0.9), int(THERE * 0.9))
    assert sorted(queries) == [(1, 1), (2, 1), (3, 1)]


def node(alive=True, cpus=2, **labels):
    return {"Alive": alive, "Resources": {"CPU": cpus}, "Labels": labels, "NodeID": "n"}


@pytest.fixture
def shares(monkeypatch):
    """Return a function that computes the shares of replicas on these nodes.

    others: numbers of replicas of other applications.
    """
    monkeypatch.setattr(node_memory, "ray", SimpleNamespace())

    def shares(nodes, others=(), **settings):
        monkeypatch.setattr(node_memory.ray, "nodes", lambda: nodes, raising=False)
        listed = {"own": 3} | {f"app{index}": each for index, each in enumerate(others)}
        monkeypatch.setattr(node_memory, "our_applications", lambda: applications(listed))
        return node_shares(config_of(ingress="serve", **settings), "own")

    return shares


def applications(replicas):
    """Return the status of applications; the last replica of each is still starting."""
    return {
        name: SimpleNamespace(
            deployments={
                ROUTER: SimpleNamespace(replica_states={"RUNNING": number - 1, "STARTING": 1})
            }
        )
        for name, number in replicas.items()
    }


@pytest.mark.parametrize(
    ("num_replicas", "nodes", "expected"), [(4, 4, 1), (4, 2, 2), (5, 2, 3), (1, 3, 1), (2, 0, 2)]
)
def test_replicas_are_spread_over_alive_nodes(shares, num_replicas, nodes, expected):
    listed = [node()] * nodes + [node(alive=False)] * 3
    assert shares(listed, num_replicas=num_replicas).target == expected


@pytest.mark.parametrize(
    ("num_replicas", "nodes", "expected"), [(4, 4, 2), (4, 1, 4), (1, 4, 1), (4, 16, 1)]
)
def test_replicas_on_two_nodes_each_count_on_both(shares, num_replicas, nodes, expected):
    assert shares([node()] * nodes, num_replicas=num_replicas, **PACKED).target == expected


def test_unsuitable_nodes_are_not_counted(shares):
    listed = [node(role="t")] * 4 + [node(role="d")] * 2 + [node(role="t", cpus=0.1)] * 5
    labels = {"target_labels": "role=t", "draft_labels": "role=d"}
    assert shares(listed, num_replicas=4, **labels) == NodeShares(target=1, draft=2)


def test_replicas_of_other_applications_count(shares):
    assert shares([node()] * 2, others=(3, 1), num_replicas=2).target == 3


SHARED = {
    "speculative_config": SpeculativeConfig.of("draft_model"),
    "num_replicas": 4,
    "replicas_per_draft_worker": 2,
}


def test_shared_draft_workers_count_on_the_nodes_where_they_may_be(shares):
    nodes = [{**node(cpus=8), "NodeID": str(index)} for index in range(2)]
    assert shares(nodes, **SHARED) == NodeShares(2 + 1, 2 + 1)
    apart = [
        *({**node(cpus=8, role="t"), "NodeID": f"t{index}"} for index in range(4)),
        {**node(cpus=8, role="d"), "NodeID": "d"},
    ]
    labels = {"target_labels": "role=t", "draft_labels": "role=d"}
    assert shares(apart, **SHARED, **labels) == NodeShares(1, 2)
