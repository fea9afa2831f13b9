"""On which nodes of a cluster the models of a replica go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.config import ServeConfig
from cluster.resources import DRAFT_BUNDLE, placement_bundles
from cluster.settings import node_labels
from specdec.errors import InvalidValueError


def bundle_labels(config: ServeConfig) -> list[dict[str, str]] | None:
    """For each bundle the labels that its node must have; None where any node will do.

    The Router goes with the target, to which it talks most.
    """
    if config.target_labels is None and config.draft_labels is None:
        return None
    target, draft = node_labels(config.target_labels), node_labels(config.draft_labels)
    return [target, target, draft][: len(placement_bundles(config))]


def require_placeable(config: ServeConfig, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Raises InvalidValueError for a bundle that no node could hold if it were empty.

    nodes: as `ray.nodes()` tells of them. Ray would wait for ever, without a word.
    """
    labels = bundle_labels(config)
    for index, bundle in enumerate(placement_bundles(config)):
        wanted = labels[index] if labels else {}
        if not any(_could_hold(node, bundle, wanted) for node in nodes):
            is_draft = index == DRAFT_BUNDLE
            field = "draft_labels" if is_draft else "target_labels"
            size = ", ".join(f"{amount:g} {resource}" for resource, amount in bundle.items())
            limit = f"labels of a node of the cluster that has {size}"
            raise InvalidValueError(field, getattr(config, field), limit)


def _could_hold(
    node: Mapping[str, Any], bundle: Mapping[str, float], labels: Mapping[str, str]
) -> bool:
    has_room = all(node["Resources"].get(name, 0) >= size for name, size in bundle.items())
    return bool(node["Alive"]) and has_room and labels.items() <= node["Labels"].items()
