"""What the machine has, and what of it a configuration takes. "auto" is resolved here."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from cluster.config import ServeConfig
from specdec.config import DTYPES, DraftLimits, EngineConfig, require_range
from specdec.errors import InvalidValueError, OutOfMemoryError
from specdec.model_config import ModelConfig
from specdec.proposers import MAX_CACHE_BYTES, NGRAM_BYTES

CPUS_PER_SHARD = 0.35
"""What a CPU rank reserves. Its threads use more; ranks beyond the cores still prove exactness."""

CPUS_PER_ROUTER = 0.2
CPUS_PER_CONTROL_PLANE = 0.1

TARGET_BUNDLE, DRAFT_BUNDLE = 1, 2
"""Indices into the placement group of a replica, whose first bundle is the Router's."""

_MIB, _GIB = 2**20, 2**30
_PROCESS_BYTES = 350 * _MIB
"""What a rank takes before it loads anything: the interpreter, torch and Ray (measured)."""
_CONTROL_PLANE_BYTES = 150 * _MIB
_GPU_WORKSPACE_BYTES = 2 * _GIB
"""Left on each GPU for activations, libraries and fragments."""

_CONTROL_GROUP = Path("/sys/fs/cgroup")
_MAX_AUTO_KV_BYTES = 2 * _GIB
_KV_SHARE_OF_FREE_MEMORY = 0.25


def available_memory_bytes() -> int:
    """Memory that can be taken now, of the machine or of the control group, the smaller one."""
    available = psutil.virtual_memory().available
    limit, used = _read_int("memory.max"), _read_int("memory.current")
    if limit is None or used is None:
        return available
    # Pages of files that were read or written are given back when memory is asked for.
    return min(available, max(0, limit - used + _reclaimable_bytes()))


def available_cpus() -> int:
    """Cores that this process may run on, whole ones of the control group's quota."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = (_read("cpu.max") or "max 1").partition(" ")
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def memory_per_replica(config: ServeConfig) -> int:
    """The bytes that a replica may take, so that all there may be fit on this machine.

    On GPUs, where each rank has one of its own: what it may take of the smallest.
    """
    if config.device == "cuda":
        return int(_smallest_gpu_bytes() * config.gpu_memory_utilization)
    return available_memory_bytes() // config.most_replicas


def threads_per_shard(tensor_parallel_size: int, num_replicas: int = 1) -> int:
    """Ranks on one machine share its cores, and so do replicas."""
    return max(1, available_cpus() // (tensor_parallel_size * num_replicas))


def placement_bundles(config: ServeConfig) -> list[dict[str, float]]:
    """What a replica reserves, by the indices above. A bundle is always on one node."""
    bundles = [{"CPU": CPUS_PER_ROUTER}, _ranks_bundle(config, config.tensor_parallel_size)]
    speculation = config.speculative_config
    if speculation is not None and speculation.method == "draft_model":
        bundles.append(_ranks_bundle(config, speculation.draft_tensor_parallel_size))
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
    if models.draft is not None and config.speculative_config is not None:
        field = "speculative_config.draft_tensor_parallel_size"
        draft_size = config.speculative_config.draft_tensor_parallel_size
        _check_size(field, draft_size, models.draft, by_machine - size, num_cpus)


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
    needed, found = int(per_replica * config.most_replicas), _num_gpus()
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


@dataclass(frozen=True)
class Models:
    """The shapes of the target and, where one drafts, of the draft model."""

    target: ModelConfig
    draft: ModelConfig | None = None


@dataclass(frozen=True)
class MemoryPlan:
    """The limits of the engine and of the draft model, which share a machine's memory."""

    engine: EngineConfig
    draft: DraftLimits | None


def memory_plan(config: ServeConfig, models: Models, available_bytes: int) -> MemoryPlan:
    """Everything that was left open decided.

    The draft model's pool has as many blocks as the target's: whatever runs fits into both.
    Raises InvalidValueError for a context longer than the model's, and OutOfMemoryError when the
    weights, the processes and the KV pools do not fit in `available_bytes`.
    """
    model = models.target
    max_model_len = config.max_model_len or model.max_position_embeddings
    require_range("max_model_len", max_model_len, 2, model.max_position_embeddings)
    blocks_of_longest = -(-max_model_len // config.block_size)
    if config.device == "cuda":
        num_blocks = _gpu_blocks(config, models, blocks_of_longest, available_bytes)
    else:
        num_blocks = _cpu_blocks(config, models, blocks_of_longest, available_bytes)
    engine = EngineConfig(
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_queue_len=config.max_queue_len,
        enable_prefix_caching=config.enable_prefix_caching,
        stream_interval=config.stream_interval,
        speculation=config.speculative_config,
    )
    return MemoryPlan(engine, _draft_limits(engine, models.draft))


def _draft_limits(engine: EngineConfig, draft: ModelConfig | None) -> DraftLimits | None:
    if draft is None or engine.speculation is None:
        return None
    own_limit = engine.speculation.max_model_len or draft.max_position_embeddings
    return DraftLimits(
        num_blocks=engine.num_blocks,
        block_size=engine.block_size,
        max_model_len=min(engine.max_model_len, own_limit, draft.max_position_embeddings),
        max_catch_up_tokens=engine.max_num_batched_tokens,
        enable_prefix_caching=engine.enable_prefix_caching,
        confidence_threshold=engine.speculation.draft_confidence_threshold,
    )


def _kv_bytes_per_token(config: ServeConfig, models: Models) -> int:
    """Of both models on all their ranks."""
    dtype, speculation = DTYPES[config.dtype], config.speculative_config
    kv_bytes = models.target.kv_bytes_per_token(dtype, config.tensor_parallel_size)
    if models.draft is not None and speculation is not None:
        size = speculation.draft_tensor_parallel_size
        kv_bytes += models.draft.kv_bytes_per_token(dtype, size)
    return kv_bytes


def _cpu_blocks(
    config: ServeConfig, models: Models, blocks_of_longest: int, available_bytes: int
) -> int:
    """All ranks of both models share one memory."""
    block_bytes = config.block_size * _kv_bytes_per_token(config, models)
    free_bytes = available_bytes - _bytes_without_kv(config, models)
    num_blocks = _num_blocks(config, block_bytes, blocks_of_longest, free_bytes)
    _check_memory(num_blocks, block_bytes, blocks_of_longest, free_bytes, available_bytes)
    return num_blocks


def _gpu_blocks(
    config: ServeConfig, models: Models, blocks_of_longest: int, available_bytes: int
) -> int:
    """Each rank has a memory of its own; the fullest decides for all."""
    sizes = [(models.target, config.tensor_parallel_size)]
    if models.draft is not None and config.speculative_config is not None:
        sizes.append((models.draft, config.speculative_config.draft_tensor_parallel_size))
    dtype = DTYPES[config.dtype]
    fitting = []
    for model, size in sizes:
        # The fullest rank's share: KV heads are divided whole.
        share = max(1, math.ceil(model.num_kv_heads / size)) / max(model.num_kv_heads, size)
        block_bytes = int(config.block_size * model.kv_bytes_per_token(dtype, size) * share)
        weight_bytes = int(model.weight_bytes(dtype) * share)
        free_bytes = available_bytes - weight_bytes - _GPU_WORKSPACE_BYTES
        if config.kv_cache_memory_gib is not None:
            free_bytes = min(free_bytes, int(config.kv_cache_memory_gib * _GIB) // size)
        needed_bytes = blocks_of_longest * block_bytes
        if free_bytes < needed_bytes:
            raise OutOfMemoryError(
                f"a rank may take {available_bytes / _GIB:.1f} GiB of its GPU; weights and "
                f"workspace leave {max(0, free_bytes) / _GIB:.1f} for the KV cache, and one "
                f"sequence of max_model_len needs {needed_bytes / _GIB:.2f}: raise "
                "tensor_parallel_size or lower max_model_len"
            )
        fitting.append(free_bytes // block_bytes)
    return min(*fitting, config.max_num_seqs * blocks_of_longest)


def _num_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _smallest_gpu_bytes() -> int:
    """What is free on the fullest GPU; raises InvalidValueError where torch finds none."""
    count = _num_gpus()
    if count == 0:
        raise InvalidValueError("device", "cuda", "cpu, or auto, where torch finds no GPU")
    return min(torch.cuda.mem_get_info(index)[0] for index in range(count))


def _num_blocks(
    config: ServeConfig, block_bytes: int, blocks_of_longest: int, free_bytes: int
) -> int:
    """As configured; else a share of free memory, within what could ever be used and a ceiling."""
    if config.kv_cache_memory_gib is not None:
        return int(config.kv_cache_memory_gib * _GIB) // block_bytes
    share = int(min(free_bytes * _KV_SHARE_OF_FREE_MEMORY, _MAX_AUTO_KV_BYTES)) // block_bytes
    return min(max(share, blocks_of_longest), config.max_num_seqs * blocks_of_longest)


def _check_memory(
    num_blocks: int,
    block_bytes: int,
    blocks_of_longest: int,
    free_bytes: int,
    available_bytes: int,
) -> None:
    if num_blocks < blocks_of_longest:
        raise OutOfMemoryError(
            f"the KV cache would have {num_blocks * block_bytes / _MIB:.1f} MiB; one sequence of "
            f"max_model_len needs {blocks_of_longest * block_bytes / _MIB:.1f}: raise "
            "kv_cache_memory_gib or lower max_model_len"
        )
    missing = num_blocks * block_bytes - free_bytes
    if missing > 0:
        raise OutOfMemoryError(
            f"weights, processes and KV cache need {(available_bytes + missing) / _GIB:.1f} GiB, "
            f"and {available_bytes / _GIB:.1f} GiB are free; lower kv_cache_memory_gib or "
            "max_model_len, or take a smaller model"
        )


def _bytes_without_kv(config: ServeConfig, models: Models) -> int:
    dtype, speculation = DTYPES[config.dtype], config.speculative_config
    num_processes = config.tensor_parallel_size + 1
    weights = models.target.weight_bytes(dtype, config.quantization_method)
    if models.draft is not None and speculation is not None:
        num_processes += speculation.draft_tensor_parallel_size
        weights += models.draft.weight_bytes(dtype, speculation.quantization)
    processes = num_processes * _PROCESS_BYTES + _CONTROL_PLANE_BYTES
    return weights + processes + _lookup_bytes(config)


def _lookup_bytes(config: ServeConfig) -> int:
    """What suffix decoding may come to keep of earlier outputs, and lookahead of n-grams."""
    speculation = config.speculative_config
    if speculation is None:
        return 0
    if speculation.method == "lookahead":
        return config.max_num_seqs * speculation.lookahead_pool_size * NGRAM_BYTES
    has_cache = speculation.suffix_decoding_max_cached_requests > 0
    return MAX_CACHE_BYTES if has_cache and "suffix" in speculation.methods else 0


def _reclaimable_bytes() -> int:
    lines = (_read("memory.stat") or "").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))


def _read_int(name: str) -> int | None:
    text = _read(name) or ""
    return int(text) if text.isdigit() else None


def _read(name: str) -> str | None:
    """A file of this process's control group (version 2), where there is one."""
    try:
        return (_CONTROL_GROUP / name).read_text().strip()
    except OSError:
        return None
