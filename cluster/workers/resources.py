"""What replicas reserve of the machine, and whether the ranks of a configuration fit on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cluster.config.serve_config import ServeConfig
from specdec.config.hardware import (
    available_cpus,
    available_memory_bytes,
    num_gpus,
    smallest_gpu_bytes,
)
from specdec.engine.model_resolution import ModelDirectories, Models
from specdec.models.config import ModelConfig
from specdec.types.errors import InvalidValueError

CPUS_PER_SHARD = 0.35
"""What a CPU rank reserves. Its threads use more; ranks beyond the cores still prove exactness."""

CPUS_PER_ROUTER = 0.2
CPUS_PER_CONTROL_PLANE = 0.1

TARGET_BUNDLE, DRAFT_BUNDLE = 1, 2
"""Indices into the placement group of a replica, whose first bundle is the Router's."""


def memory_per_replica(config: ServeConfig, num_replicas: int | None = None) -> int:
    """The bytes that a replica may take, so that all there may be fit on this machine.

    num_replicas: of all models together; None: this one is alone.
    On GPUs, where each rank has one of its own: what it may take of the smallest.
    """
    if config.device == "cuda":
        return int(smallest_gpu_bytes() * config.gpu_memory_utilization)
    return available_memory_bytes() // (num_replicas or config.most_replicas)


@dataclass(frozen=True)
class ReplicaMemory:
    """What a replica may take: on CPUs of a node, on GPUs of the smallest that a rank has.

    draft_bytes: None where the draft model shares the target's node, or there is none.
    """

    target_bytes: int
    draft_bytes: int | None = None


@dataclass(frozen=True)
class FoundByDriver:
    """What whoever deploys has found out, where there is one node alone.

    memory_bytes: what a replica may take. num_sharing: replicas that share the node's cores.
    """

    directories: ModelDirectories
    memory_bytes: int
    num_sharing: int


def threads_per_shard(tensor_parallel_size: int, num_replicas: int = 1) -> int:
    """Of a rank on this machine: the ranks of a group share its cores, and so do replicas."""
    return max(1, available_cpus() // (tensor_parallel_size * num_replicas))


def placement_bundles(config: ServeConfig) -> list[dict[str, float]]:
    """What a replica reserves, by the indices above. A bundle is always on one node."""
    bundles = [{"CPU": CPUS_PER_ROUTER}, _ranks_bundle(config, config.tensor_parallel_size)]
    if config.draft_model is not None:
        bundles.append(_ranks_bundle(config, config.draft_model.draft_tensor_parallel_size))
    return bundles


def _ranks_bundle(config: ServeConfig, num_ranks: int) -> dict[str, float]:
    # Ray counts in ten thousandths and drops the rest, and 3 * 0.35 is a little less than 1.05.
    bundle = {"CPU": round(CPUS_PER_SHARD * num_ranks, 4)}
    return bundle if config.device == "cpu" else {**bundle, "GPU": float(num_ranks)}


def check_ranks(config: ServeConfig, models: Models, num_cpus: int) -> None:
    """Raises InvalidValueError unless the models can be divided so and the machine bears it."""
    _check_replicas(config, num_cpus)
    if config.device == "cuda":
        _check_gpus(config)
    cpus_per_replica = (num_cpus - CPUS_PER_CONTROL_PLANE) / config.most_replicas
    by_machine = int((cpus_per_replica - CPUS_PER_ROUTER) / CPUS_PER_SHARD)
    field, size = "tensor_parallel_size", config.tensor_parallel_size
    _check_size(field, size, models.target, by_machine, num_cpus)
    if models.draft is not None and config.draft_model is not None:
        field = "speculative_config.draft_tensor_parallel_size"
        draft_size = config.draft_model.draft_tensor_parallel_size
        _check_size(field, draft_size, models.draft, by_machine - size, num_cpus)


def total(bundles: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """What they take together, by resource."""
    sums: dict[str, float] = {}
    for bundle in bundles:
        for resource, amount in bundle.items():
            sums[resource] = sums.get(resource, 0.0) + amount
    return {resource: round(amount, 4) for resource, amount in sums.items()}  # as Ray counts


def check_together(
    configs: Sequence[ServeConfig], num_cpus: int, count_gpus: Callable[[], int]
) -> None:
    """Raises InvalidValueError unless the machine bears the ranks of all models at once.

    count_gpus: those that are here; only asked for where a model runs on some.
    """
    if len(configs) == 1:
        return  # whose own limits say it better
    bundles = (b for each in configs for b in placement_bundles(each) * each.most_replicas)
    for resource, needed in total(bundles).items():
        found = num_cpus if resource == "CPU" else count_gpus()
        if needed > found:
            limit = f"fewer, or of fewer ranks: they want {needed:g} {resource}, {found} are here"
            raise InvalidValueError("models", f"{len(configs)} models", limit)


def _check_replicas(config: ServeConfig, num_cpus: int) -> None:
    """Where not even one fits, it is the ranks that are too many."""
    cpus_per_replica = sum(bundle["CPU"] for bundle in placement_bundles(config))
    limit = max(1, int((num_cpus - CPUS_PER_CONTROL_PLANE) / cpus_per_replica))
    if config.most_replicas > limit:
        field = "num_replicas" if config.max_replicas is None else "max_replicas"
        reason = f"from 1 to {limit}, as many as this machine of {num_cpus} cores bears"
        raise InvalidValueError(field, config.most_replicas, reason)


def _check_gpus(config: ServeConfig) -> None:
    per_replica = sum(bundle.get("GPU", 0) for bundle in placement_bundles(config))
    needed, found = int(per_replica * config.most_replicas), num_gpus()
    if needed > found:
        limit = (
            f"such that each rank of each model and replica has a GPU of its own: {needed} are "
            f"needed, {found} are here"
        )
        raise InvalidValueError("tensor_parallel_size", config.tensor_parallel_size, limit)


def _check_size(
    field: str, size: int, model: ModelConfig, num_ranks_left: int, num_cpus: int
) -> None:
    limit = min(num_ranks_left, model.num_heads)
    if size > limit:
        reason = (
            f"from 1 to {limit}: the model has {model.num_heads} attention heads, and this machine "
            f"of {num_cpus} cores bears {num_ranks_left} ranks of it"
        )
        raise InvalidValueError(field, size, reason)
