"""The memory of the nodes that a replica's models are placed on, asked of those nodes."""

from __future__ import annotations

from typing import Any

import ray
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config import ServeConfig
from cluster.resources import (
    DRAFT_BUNDLE,
    TARGET_BUNDLE,
    ReplicaMemory,
    available_memory_bytes,
    smallest_gpu_bytes,
)

_ANSWER_TIMEOUT_S = 120.0
"""A process has to be started there, and on a GPU to import torch."""


def replica_memory(config: ServeConfig, placement: PlacementGroup, share: int) -> ReplicaMemory:
    """What this replica may take where `placement` has put its models.

    share: how many replicas there may be on a node, which divide the memory of its host. Raises
    what asking another node raises, GetTimeoutError if one does not answer.
    """
    nodes = placement_group_table(placement)["bundles_to_node_id"]
    share = share if config.device == "cpu" else 1  # each rank has a GPU of its own
    target_bytes = _bundle_bytes(config, placement, TARGET_BUNDLE, nodes) // share
    draft_node = nodes.get(DRAFT_BUNDLE)
    if draft_node is None or (config.device == "cpu" and draft_node == nodes[TARGET_BUNDLE]):
        return ReplicaMemory(target_bytes)
    draft_bytes = _bundle_bytes(config, placement, DRAFT_BUNDLE, nodes) // share
    return ReplicaMemory(target_bytes, draft_bytes)


def replicas_per_node(config: ServeConfig) -> int:
    """How many replicas a node may have to bear, where they are spread over all that are alive."""
    num_nodes = sum(1 for node in ray.nodes() if node["Alive"])
    return -(-config.most_replicas // max(1, num_nodes))


def _bundle_bytes(
    config: ServeConfig, placement: PlacementGroup, bundle: int, nodes: dict[int, str]
) -> int:
    if config.device == "cpu" and nodes[bundle] == ray.get_runtime_context().get_node_id():
        return available_memory_bytes()
    strategy = PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=bundle)
    options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": strategy}
    if config.device == "cpu":
        asked = ray.remote(available_memory_bytes).options(**options).remote()
        return int(ray.get(asked, timeout=_ANSWER_TIMEOUT_S))
    ranks = int(placement.bundle_specs[bundle]["GPU"])
    # One call that sees all GPUs of the bundle, and ends before the ranks want them.
    asked = ray.remote(max_calls=1)(smallest_gpu_bytes).options(num_gpus=ranks, **options).remote()
    of_smallest = float(ray.get(asked, timeout=_ANSWER_TIMEOUT_S))
    return int(of_smallest * config.gpu_memory_utilization)
