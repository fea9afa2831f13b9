"""The available memory of the nodes that a replica's models are placed on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config.serve_config import ServeConfig
from cluster.control.peers import ROUTER, our_applications
from cluster.workers.ray.resources import (
    ReplicaMemory,
    draft_bundle,
    nodes_for,
    target_bundles,
)
from specdec.config.hardware import available_memory_bytes, smallest_gpu_bytes

_ANSWER_TIMEOUT_S = 120.0
"""Covers the start of a process on the node, which imports torch on a GPU."""


@dataclass(frozen=True)
class NodeShares:
    """The most replicas on one node of the target, and on one node of the draft model."""

    target: int
    draft: int


def replica_memory(
    config: ServeConfig, placement: PlacementGroup, shares: NodeShares
) -> ReplicaMemory:
    """Return the memory that this replica may use on the nodes of its placement group.

    shares: the replicas that divide a host's memory. Raises what a remote call raises, as
    GetTimeoutError if a node does not answer.
    """
    nodes = placement_group_table(placement)["bundles_to_node_id"]
    if config.device == "cuda":
        shares = NodeShares(1, 1)  # no other replica has the GPUs of this one
    target, draft = target_bundles(config), draft_bundle(config)
    has_own_memory = len(target) > 1 or not (config.shares_gpu or config.device == "cpu")
    is_apart = draft in nodes and (has_own_memory or nodes[draft] != nodes[target[0]])
    bundles = [*target, draft] if is_apart else target
    with ThreadPoolExecutor(len(bundles)) as pool:
        found = [*pool.map(partial(_bundle_bytes, config, placement, nodes), bundles)]
    if config.device == "cpu":  # where bundles have equal parts of the memory of their node
        sharing = Counter(nodes[each] for each in bundles)
        found = [size // sharing[nodes[each]] for each, size in zip(bundles, found, strict=True)]
    num_parts = len(target) if config.device == "cpu" else 1
    target_bytes = num_parts * min(found[: len(target)]) // shares.target
    return ReplicaMemory(target_bytes, found[-1] // shares.draft if is_apart else None)


def node_shares(config: ServeConfig, own_application: str) -> NodeShares:
    """Return the shares when replicas are spread over all nodes with matching labels and size.

    Replicas of other applications count as if they were spread over the same nodes: their labels
    and the replicas that they may still add are not known here.
    """
    num_replicas = config.most_replicas + _num_other_replicas(own_application)
    nodes = ray.nodes()

    def share(bundles: int, *, is_draft: bool) -> int:
        """Return the replicas on a node, if each has its bundles on as many nodes as possible."""
        num_nodes = max(1, len(nodes_for(config, nodes, is_draft=is_draft)))
        return -(-num_replicas * min(bundles, num_nodes) // num_nodes)

    of_target = share(len(target_bundles(config)), is_draft=False)
    if config.shares_draft_workers:
        return _with_shared_workers(config, nodes, of_target)
    has_draft = config.draft_model is not None
    return NodeShares(of_target, share(1, is_draft=True) if has_draft else of_target)


def _with_shared_workers(
    config: ServeConfig, nodes: Sequence[Mapping[str, Any]], of_target: int
) -> NodeShares:
    """Return the shares where replicas share draft workers, which may be on the targets' nodes."""
    of_targets, of_drafts = (
        {node["NodeID"] for node in nodes_for(config, nodes, is_draft=is_draft)}
        for is_draft in (False, True)
    )
    of_draft = -(-config.num_shared_draft_workers // max(1, len(of_drafts)))
    if of_targets.isdisjoint(of_drafts):
        return NodeShares(of_target, of_draft)
    return NodeShares(of_target + of_draft, of_target + of_draft)


def _num_other_replicas(own_application: str) -> int:
    """Count other applications' replicas in any state: starting ones need memory, too."""
    return sum(
        sum(application.deployments[ROUTER].replica_states.values())
        for name, application in our_applications().items()
        if name != own_application
    )


def _bundle_bytes(
    config: ServeConfig, placement: PlacementGroup, nodes: dict[int, str], bundle: int
) -> int:
    if config.device == "cpu" and nodes[bundle] == ray.get_runtime_context().get_node_id():
        return available_memory_bytes()
    strategy = PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=bundle)
    options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": strategy}
    if config.device == "cpu":
        result = ray.remote(available_memory_bytes).options(**options).remote()
        return int(ray.get(result, timeout=_ANSWER_TIMEOUT_S))
    gpus = placement.bundle_specs[bundle]["GPU"]
    # One task that sees all GPUs of the bundle, and ends before the ranks need them.
    result = ray.remote(max_calls=1)(smallest_gpu_bytes).options(num_gpus=gpus, **options).remote()
    smallest_bytes = float(ray.get(result, timeout=_ANSWER_TIMEOUT_S))
    return int(smallest_bytes * config.gpu_memory_utilization)
