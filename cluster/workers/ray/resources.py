"""Resources that replicas reserve, their placement on nodes, and checks that both fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from cluster.config.serve_config import ServeConfig
from specdec.config.fields import node_labels
from specdec.config.hardware import (
    available_memory_bytes,
    num_gpus,
    smallest_gpu_bytes,
)
from specdec.engine.models.model_resolution import ModelDirectories, Models
from specdec.models.config.model_config import ModelConfig
from specdec.types.errors import InvalidValueError

CPUS_PER_WORKER = 0.35
"""Reserved by a CPU rank. Its threads use more; more ranks than cores still compute exactly."""

SHARED_GPU = 0.5
"""Reserved by each of two ranks that share a GPU: the target's and the draft model's. Their memory
is divided by the memory plan."""

CPUS_PER_ROUTER = 0.2
CPUS_PER_CONTROL_PLANE = 0.1


def target_bundles(config: ServeConfig) -> range:
    """Return the indices of the target's bundles in the placement group of a replica.

    All ranks are in one bundle, or each rank has its own. The Router's bundle comes before them,
    that of the draft model after them. A draft worker that replicas share has a separate placement
    group, with a single bundle.
    """
    is_one = config.target_placement == "strict_pack"
    return range(1, 2 if is_one else 1 + config.tensor_parallel_size)


def draft_bundle(config: ServeConfig) -> int:
    """Return the index of the draft model's bundle; see `target_bundles`."""
    return target_bundles(config).stop


def placement_strategy(config: ServeConfig) -> Literal["PACK", "SPREAD"]:
    """Return Ray's strategy for the bundles of a replica."""
    return "SPREAD" if config.target_placement == "spread" else "PACK"


def memory_per_replica(config: ServeConfig, num_replicas: int | None = None) -> int:
    """Return the bytes that a replica may use, so that the most replicas fit on this machine.

    num_replicas: of all models together; None if this model is the only one.
    On GPUs: the bytes to use of the smallest.
    """
    if config.device == "cuda":
        return int(smallest_gpu_bytes() * config.gpu_memory_utilization)
    return available_memory_bytes() // (num_replicas or config.most_replicas)


@dataclass(frozen=True)
class ReplicaMemory:
    """The bytes that a replica may use: of a node's memory on CPUs, of the smallest GPU on GPUs.

    draft_bytes: None where the draft model shares the target's node, or there is none.
    """

    target_bytes: int
    draft_bytes: int | None = None


@dataclass(frozen=True)
class LocatedModels:
    """Models that the deploying process has located, where there is only one node.

    memory_bytes: that a replica may use. replicas_per_node: replicas that share the node's cores.
    refusal: file in which a replica reports why it cannot start; None without a reader.
    """

    directories: ModelDirectories
    memory_bytes: int
    replicas_per_node: int
    refusal: Path | None = None


def placement_bundles(config: ServeConfig) -> list[dict[str, float]]:
    """Return a replica's resources, by the indices above. A bundle is always on one node."""
    bundles = [{"CPU": CPUS_PER_ROUTER}, *_target_bundles(config)]
    if config.draft_model is not None and not config.shares_draft_workers:
        bundles.append(_ranks_bundle(config, config.draft_model.draft_tensor_parallel_size))
    return bundles


def _target_bundles(config: ServeConfig) -> list[dict[str, float]]:
    count = len(target_bundles(config))
    return [_ranks_bundle(config, config.tensor_parallel_size // count)] * count


def shared_draft_bundle(config: ServeConfig) -> dict[str, float]:
    """Return the resources of a draft worker that replicas share."""
    return _ranks_bundle(config, 1)


def service_bundles(config: ServeConfig) -> list[dict[str, float]]:
    """Return the resources of all replicas of a model, and of the draft workers that they share."""
    replicas = placement_bundles(config) * config.most_replicas
    return replicas + [shared_draft_bundle(config)] * config.num_shared_draft_workers


def _ranks_bundle(config: ServeConfig, num_ranks: int) -> dict[str, float]:
    # Ray truncates to ten thousandths, and 3 * 0.35 is a little less than 1.05.
    bundle = {"CPU": round(CPUS_PER_WORKER * num_ranks, 4)}
    return (
        bundle if config.device == "cpu" else {**bundle, "GPU": num_ranks * gpus_per_rank(config)}
    )


def gpus_per_rank(config: ServeConfig) -> float:
    """Return the GPUs that a rank reserves; 0 on CPUs."""
    if config.device == "cpu":
        return 0.0
    return SHARED_GPU if config.shares_gpu else 1.0


def check_ranks(config: ServeConfig, models: Models, num_cpus: int) -> None:
    """Raise InvalidValueError unless the models can be sharded so and the ranks fit."""
    _check_replicas(config, num_cpus)
    needed = math.ceil(sum(bundle.get("GPU", 0) for bundle in service_bundles(config)))
    if needed and needed > (found := num_gpus()):
        limit = (
            f"such that each rank of each model and replica has its own GPU: {needed} are needed, "
            f"{found} are available; with one rank each, target and draft model can share one "
            "(share_gpu in speculative_config)"
        )
        raise InvalidValueError("tensor_parallel_size", config.tensor_parallel_size, limit)
    cpus_per_replica = _cpus_for_replicas(config, num_cpus) / config.most_replicas
    by_machine = int((cpus_per_replica - CPUS_PER_ROUTER) / CPUS_PER_WORKER)
    field, size = "tensor_parallel_size", config.tensor_parallel_size
    _check_size(field, size, models.target, by_machine, num_cpus)
    has_own = models.draft is not None and not config.shares_draft_workers
    if has_own and models.draft is not None and config.draft_model is not None:
        field = "speculative_config.draft_tensor_parallel_size"
        draft_size = config.draft_model.draft_tensor_parallel_size
        if by_machine <= size:
            reason = (
                f"left out, and the method one without a draft model: the target's {size} ranks "
                f"take all {num_cpus} cores of this machine"
            )
            raise InvalidValueError(field, draft_size, reason)
        _check_size(field, draft_size, models.draft, by_machine - size, num_cpus)


def total(bundles: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sum of bundles by resource."""
    sums: dict[str, float] = {}
    for bundle in bundles:
        for resource, amount in bundle.items():
            sums[resource] = sums.get(resource, 0.0) + amount
    return {resource: round(amount, 4) for resource, amount in sums.items()}  # Ray's precision


def check_together(
    configs: Sequence[ServeConfig], num_cpus: int, count_gpus: Callable[[], int]
) -> None:
    """Raise InvalidValueError unless the ranks of all models fit on the machine at once.

    count_gpus: returns the number of GPUs; only called where a model uses some.
    """
    if len(configs) == 1:
        return  # its own limits give a better message
    bundles = (bundle for each in configs for bundle in service_bundles(each))
    for resource, needed in total(bundles).items():
        found = num_cpus if resource == "CPU" else count_gpus()
        if needed > found:
            need = f"they need {needed:g} {resource}, {found} are available"
            raise InvalidValueError(
                "models", f"{len(configs)} models", f"fewer, or with fewer ranks: {need}"
            )


def _check_replicas(config: ServeConfig, num_cpus: int) -> None:
    """Check the number of replicas; if not even one fits, there are too many ranks instead."""
    cpus_per_replica = sum(bundle["CPU"] for bundle in placement_bundles(config))
    limit = max(1, int(_cpus_for_replicas(config, num_cpus) / cpus_per_replica))
    if config.most_replicas > limit:
        field = "num_replicas" if config.max_replicas is None else "max_replicas"
        reason = f"from 1 to {limit}, the most that fit on the {num_cpus} cores of this machine"
        raise InvalidValueError(field, config.most_replicas, reason)


def _cpus_for_replicas(config: ServeConfig, num_cpus: int) -> float:
    """Return the cores that the ControlPlane and shared draft workers leave."""
    of_workers = config.num_shared_draft_workers * shared_draft_bundle(config)["CPU"]
    return num_cpus - CPUS_PER_CONTROL_PLANE - of_workers


def _check_size(
    field: str, size: int, model: ModelConfig, num_ranks_left: int, num_cpus: int
) -> None:
    limit = min(num_ranks_left, model.num_heads)
    if size > limit:
        reason = (
            f"from 1 to {limit}: the model has {model.num_heads} attention heads, and the "
            f"{num_cpus} cores of this machine fit {num_ranks_left} ranks of it"
        )
        raise InvalidValueError(field, size, reason)


def bundle_labels(config: ServeConfig) -> list[dict[str, str]] | None:
    """Return the labels that each bundle's node must have; None without label selectors.

    The Router is placed with the target, with which it communicates most.
    """
    if config.target_labels is None and config.draft_labels is None:
        return None
    target, draft = node_labels(config.target_labels), node_labels(config.draft_labels)
    labels = [target] * draft_bundle(config) + [draft]
    return labels[: len(placement_bundles(config))]


def shared_draft_labels(config: ServeConfig) -> list[dict[str, str]] | None:
    """Return the same for the bundle of a draft worker that replicas share."""
    return None if config.draft_labels is None else [node_labels(config.draft_labels)]


@dataclass(frozen=True)
class _Bundle:
    """A bundle that a model needs `count` times at the start. nodes: ids of those with its labels.

    is_draft: whether it is that of a draft model, of the replica's own or a shared one.
    """

    config: ServeConfig
    is_draft: bool
    size: Mapping[str, float]
    nodes: frozenset[str]
    count: int

    def refuse(self, missing: str) -> NoReturn:
        """Raise InvalidValueError that names the labels, or the ranks where there are none."""
        is_draft, config = self.is_draft, self.config
        field = "draft_labels" if is_draft else "target_labels"
        value: object = getattr(config, field)
        if value is not None:
            raise InvalidValueError(field, value, f"labels of {missing}")
        field, value = "tensor_parallel_size", config.tensor_parallel_size
        if is_draft and config.draft_model is not None:
            field = "speculative_config.draft_tensor_parallel_size"
            value = config.draft_model.draft_tensor_parallel_size
        limit = f"fewer, unless the cluster has {missing}"
        if not is_draft and config.target_placement == "strict_pack":
            limit += f", or target_placement is {'spread' if config.device == 'cpu' else 'pack'}"
        raise InvalidValueError(field, value, limit)


def require_placeable(configs: Sequence[ServeConfig], nodes: Sequence[Mapping[str, Any]]) -> None:
    """Raise InvalidValueError for models that could not be placed on the empty cluster.

    That is a bundle that no node can hold, or bundles of all replicas required at the start that
    need more of a resource than all nodes with their labels have. nodes: from `ray.nodes()`. Ray
    itself would wait indefinitely, without a message.
    """
    bundles = [bundle for each in configs for bundle in _needed_bundles(each, nodes)]
    for each in bundles:
        if not any(node["NodeID"] in each.nodes and _holds(node, each.size) for node in nodes):
            size = ", ".join(f"{amount:g} {resource}" for resource, amount in each.size.items())
            each.refuse(f"a node with {size}")
    for each in bundles:  # with all others that must be placed on the same nodes
        inside = [
            other.size for other in bundles if other.nodes <= each.nodes for _ in range(other.count)
        ]
        found = total(node["Resources"] for node in nodes if node["NodeID"] in each.nodes)
        for resource, needed in total(inside).items():
            if needed > found.get(resource, 0) and resource in each.size:
                each.refuse(f"nodes with {needed:g} {resource} together, as all replicas need")


def _needed_bundles(config: ServeConfig, nodes: Sequence[Mapping[str, Any]]) -> Iterator[_Bundle]:
    sizes = [(size, config.fewest_replicas) for size in placement_bundles(config)]
    if config.shares_draft_workers:
        sizes.append((shared_draft_bundle(config), config.fewest_shared_draft_workers))
    for index, (size, count) in enumerate(sizes):
        is_draft = index == draft_bundle(config)
        found = _with_labels(config, nodes, is_draft=is_draft)
        yield _Bundle(config, is_draft, size, frozenset(node["NodeID"] for node in found), count)


def nodes_for(
    config: ServeConfig, nodes: Sequence[Mapping[str, Any]], *, is_draft: bool
) -> list[Mapping[str, Any]]:
    """Return the nodes that could hold a bundle of the target, or the draft model, if empty."""
    if not is_draft:
        bundle = _target_bundles(config)[0]
    elif config.shares_draft_workers:
        bundle = shared_draft_bundle(config)
    else:
        bundle = placement_bundles(config)[draft_bundle(config)]
    found = _with_labels(config, nodes, is_draft=is_draft)
    return [node for node in found if _holds(node, bundle)]


def _holds(node: Mapping[str, Any], bundle: Mapping[str, float]) -> bool:
    """Return whether an empty node has the resources of a bundle."""
    return all(node["Resources"].get(name, 0) >= size for name, size in bundle.items())


def _with_labels(
    config: ServeConfig, nodes: Sequence[Mapping[str, Any]], *, is_draft: bool
) -> list[Mapping[str, Any]]:
    role = config.draft_labels if is_draft else config.target_labels
    wanted = node_labels(role).items()
    return [node for node in nodes if node["Alive"] and wanted <= node["Labels"].items()]
