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
class _Wanted:
    """A bundle that each required replica of a model needs. nodes: ids of those with its labels."""

    config: ServeConfig
    index: int
    size: Mapping[str, float]
    nodes: frozenset[str]

    @property
    def sizes(self) -> list[Mapping[str, float]]:
        """The sizes of the bundles of all required replicas."""
        return [self.size] * self.config.fewest_replicas

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
    for config in configs:
        for index, bundle in enumerate(placement_bundles(config)):
            if not nodes_for(config, index, nodes):
                size = ", ".join(f"{amount:g} {resource}" for resource, amount in bundle.items())
                _wanted(config, index, nodes).refuse(f"a node with {size}")
    _require_room_for_all(configs, nodes)


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


def _wanted(config: ServeConfig, index: int, nodes: Sequence[Mapping[str, Any]]) -> _Wanted:
    ids = frozenset(node["NodeID"] for node in _with_labels(config, index, nodes))
    return _Wanted(config, index, placement_bundles(config)[index], ids)


def _require_room_for_all(
    configs: Sequence[ServeConfig], nodes: Sequence[Mapping[str, Any]]
) -> None:
    """Check each set of nodes against all bundles that must be placed on nodes of that set."""
    wanted = [
        _wanted(config, index, nodes)
        for config in configs
        for index in range(len(placement_bundles(config)))
    ]
    for each in wanted:
        inside = (size for other in wanted if other.nodes <= each.nodes for size in other.sizes)
        found = total(node["Resources"] for node in nodes if node["NodeID"] in each.nodes)
        for resource, needed in total(inside).items():
            if needed > found.get(resource, 0) and resource in each.size:
                each.refuse(f"nodes with {needed:g} {resource} together, as all replicas need")
