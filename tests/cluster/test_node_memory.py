"""Which nodes are asked for memory, with a Ray that is only played."""

from types import SimpleNamespace

import pytest

from cluster import node_memory
from cluster.config import ServeConfig
from cluster.node_memory import replica_memory, replicas_per_node
from cluster.resources import ReplicaMemory, placement_bundles
from specdec.speculative_config import SpeculativeConfig

GIB = 2**30
HERE, THERE = 12 * GIB, 6 * GIB


@pytest.fixture
def placed(monkeypatch):
    """Asks for the memory of a replica whose bundles are on these nodes; ours is `a`."""
    asked = []

    def remote(function=None, **_):
        if function is None:
            return remote
        return SimpleNamespace(options=lambda **options: asking(options))

    def asking(options):
        strategy = options["scheduling_strategy"]
        asked.append((strategy.placement_group_bundle_index, options.get("num_gpus", 0)))
        return SimpleNamespace(remote=lambda: THERE)

    ray = SimpleNamespace(
        remote=remote,
        get=lambda value, timeout: value,
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "a"),
    )
    monkeypatch.setattr(node_memory, "ray", ray)
    monkeypatch.setattr(node_memory, "available_memory_bytes", lambda: HERE)

    def place(config, *nodes, share=1):
        table = {"bundles_to_node_id": dict(enumerate(nodes))}
        monkeypatch.setattr(node_memory, "placement_group_table", lambda placement: table)
        placement = SimpleNamespace(bundle_specs=placement_bundles(config))
        asked.clear()
        return replica_memory(config, placement, share), list(asked)

    return place


def config_of(device="cpu", **settings):
    speculation = SpeculativeConfig("draft_model")
    return ServeConfig(model="tiny", device=device, speculative_config=speculation, **settings)


def test_on_one_node_nobody_is_asked(placed):
    assert placed(config_of(), "a", "a", "a") == (ReplicaMemory(HERE), [])
    assert placed(config_of(), "a", "a", "a", share=3) == (ReplicaMemory(HERE // 3), [])


def test_a_node_of_the_draft_alone_is_asked(placed):
    assert placed(config_of(), "a", "a", "b") == (ReplicaMemory(HERE, THERE), [(2, 0)])


def test_models_that_share_another_node_share_its_memory(placed):
    assert placed(config_of(), "a", "b", "b") == (ReplicaMemory(THERE), [(1, 0)])


def test_gpus_are_asked_where_they_are_and_not_divided(placed):
    config = config_of("cuda", tensor_parallel_size=4, gpu_memory_utilization=0.5)
    memory, asked = placed(config, "a", "a", "a", share=3)
    assert memory == ReplicaMemory(THERE // 2, THERE // 2)
    assert asked == [(1, 4), (2, 1)]


@pytest.mark.parametrize(
    ("num_replicas", "nodes", "expected"), [(4, 4, 1), (4, 2, 2), (5, 2, 3), (1, 3, 1), (2, 0, 2)]
)
def test_replicas_are_spread_over_the_nodes_that_are_alive(
    monkeypatch, num_replicas, nodes, expected
):
    listed = [{"Alive": True}] * nodes + [{"Alive": False}] * 3
    monkeypatch.setattr(node_memory.ray, "nodes", lambda: listed)
    config = ServeConfig(model="tiny", ingress="serve", num_replicas=num_replicas)
    assert replicas_per_node(config) == expected
