"""Placement of a replica's models on the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from cluster.config.serve_config import ServeConfig
from cluster.workers.resources import DRAFT_BUNDLE, placement_bundles, total
from specdec.config.fields import node_labels
from specdec.types.errors import InvalidValueError


def bundle_labels(config: ServeConfig) -> list[dict[str, str]] | None:
    """Return the labels that each bundle's node must have; None without label selectors.

    The Router is placed with the target, with which it communicates most.
    """
    if config.target_labels is None and config.draft_labels is None:
        return None
    target, draft = node_labels(config.target_labels), node_labels(config.draft_labels)
    return [target, target, draft][: len(placement_bundles(config))]


@dataclass(frozen=True)
class _Bundle:
    """A bundle that each required replica of a model needs. nodes: ids of those with its labels."""

    config: ServeConfig
    index: int
    size: Mapping[str, float]
    nodes: frozenset[str]

    def refuse(self, missing: str) -> NoReturn:
        """Raise InvalidValueError that names the labels, or the ranks where there are none."""
        is_draft, config = self.index == DRAFT_BUNDLE, self.config
        field = "draft_labels" if is_draft else "target_labels"
        value: object = getattr(config, field)
        if value is not None:
            raise InvalidValueError(field, value, f"labels of {missing}")
        field, value = "tensor_parallel_size", config.tensor_parallel_size
        if is_draft and config.draft_model is not None:
            field = "speculative_config.draft_tensor_parallel_size"
            value = config.draft_model.draft_tensor_parallel_size
        raise InvalidValueError(field, value, f"fewer, unless the cluster has {missing}")


def require_placeable(configs: Sequence[ServeConfig], nodes: Sequence[Mapping[str, Any]]) -> None:
    """Raise InvalidValueError for models that could not be placed on the empty cluster.

    That is a bundle that no node can hold, or bundles of all replicas required at the start that
    need more of a resource than all nodes with their labels have. nodes: from `ray.nodes()`. Ray
    itself would wait indefinitely, without a message.
    """
    bundles = [
        _Bundle(
            config,
            index,
            size,
            frozenset(node["NodeID"] for node in _with_labels(config, index, nodes)),
        )
        for config in configs
        for index, size in enumerate(placement_bundles(config))
    ]
    for each in bundles:
        if not nodes_for(each.config, each.index, nodes):
            size = ", ".join(f"{amount:g} {resource}" for resource, amount in each.size.items())
            each.refuse(f"a node with {size}")
    for each in bundles:  # with all others that must be placed on the same nodes
        inside = [
            other.size
            for other in bundles
            if other.nodes <= each.nodes
            for _ in range(other.config.fewest_replicas)
        ]
        found = total(node["Resources"] for node in nodes if node["NodeID"] in each.nodes)
        for resource, needed in total(inside).items():
            if needed > found.get(resource, 0) and resource in each.size:
                each.refuse(f"nodes with {needed:g} {resource} together, as all replicas need")


def nodes_for(
    config: ServeConfig, index: int, nodes: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the nodes that could hold the bundle of this index if they were empty."""
    bundle = placement_bundles(config)[index]
    return [
        node
        for node in _with_labels(config, index, nodes)
        if all(node["Resources"].get(name, 0) >= size for name, size in bundle.items())
    ]


def _with_labels(
    config: ServeConfig, index: int, nodes: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    labels = bundle_labels(config)
    wanted = labels[index].items() if labels else set()
    return [node for node in nodes if node["Alive"] and wanted <= node["Labels"].items()]
