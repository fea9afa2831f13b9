"""On which nodes of a cluster the models of a replica go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from cluster.config.serve_config import ServeConfig
from cluster.workers.resources import DRAFT_BUNDLE, placement_bundles, total
from specdec.config.fields import node_labels
from specdec.types.errors import InvalidValueError


def bundle_labels(config: ServeConfig) -> list[dict[str, str]] | None:
    """For each bundle the labels that its node must have; None where any node will do.

    The Router goes with the target, to which it talks most.
    """
    if config.target_labels is None and config.draft_labels is None:
        return None
    target, draft = node_labels(config.target_labels), node_labels(config.draft_labels)
    return [target, target, draft][: len(placement_bundles(config))]


@dataclass(frozen=True)
class _Wanted:
    """A bundle of all replicas that a model has to have. nodes: ids of those with its labels."""

    config: ServeConfig
    index: int
    size: Mapping[str, float]
    nodes: frozenset[str]

    @property
    def sizes(self) -> list[Mapping[str, float]]:
        """Of each replica."""
        return [self.size] * self.config.fewest_replicas

    def refuse(self, missing: str) -> NoReturn:
        """Raises what names the labels, or the ranks where any node will do."""
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
    """Raises InvalidValueError for what could not be placed if the cluster were empty.

    That is a bundle that no node holds, or bundles that want more of something, with all replicas
    that there have to be at the start, than all nodes with their labels have. nodes: as
    `ray.nodes()` tells of them. Ray would wait for ever, without a word.
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
    """Those that could hold the bundle of this index if they were empty."""
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
    """On each set of nodes for all that has to be on some of these."""
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
                each.refuse(f"nodes with {needed:g} {resource} together, as all replicas want")
