"""Memory of GPUs: the KV pools of models whose ranks each have one, or share one."""

from __future__ import annotations

from specdec.config.llm import LLMConfig
from specdec.engine.memory.gpu_workspace import gpu_workspace_bytes
from specdec.engine.memory.kv_pools import KvPool, NumBlocks, fill
from specdec.engine.memory.weight_memory import require_room
from specdec.types.errors import OutOfMemoryError

_GIB = 2**30


def gpu_memory_settings(config: LLMConfig) -> str:
    """Return the settings by which ranks take less memory of a GPU, with their values."""
    return (
        f"gpu_memory_utilization ({config.gpu_memory_utilization:g}) or "
        f"max_num_seqs ({config.max_num_seqs})"
    )


def divide_gpu(config: LLMConfig, target: KvPool, draft: KvPool, available_bytes: int) -> NumBlocks:
    """Size the pools where both models, with one rank each, share one GPU."""
    without_kv = sum(_gpu_bytes_without_kv(config, pool) for pool in (target, draft))
    require_room(config, target.model, available_bytes, available_bytes - without_kv)
    free_bytes = max(0, available_bytes - without_kv)
    if config.kv_cache_memory_gib is not None:
        free_bytes = min(free_bytes, int(config.kv_cache_memory_gib * _GIB))
    fitting = fill(free_bytes, target.block_bytes, draft)
    found = NumBlocks(min(fitting.target, target.most_blocks), fitting.draft)
    if found.target < target.blocks_of_longest or found.draft < draft.blocks_of_longest:
        needed = sum(pool.blocks_of_longest * pool.block_bytes for pool in (target, draft))
        raise OutOfMemoryError(
            f"target and draft model may take {available_bytes / _GIB:.1f} GiB of the GPU that "
            f"they share; weights and workspaces leave {free_bytes / _GIB:.2f} for both KV caches, "
            f"and one sequence of max_model_len needs {needed / _GIB:.2f}: lower max_model_len, "
            "max_num_seqs or max_num_batched_tokens, or draft on another GPU or without a model"
        )
    return found


def _gpu_bytes_without_kv(config: LLMConfig, pool: KvPool) -> int:
    """Return the bytes of a model's only rank on its GPU beside the KV pool."""
    weights = pool.weight_bytes + pool.extra_bytes
    return weights + gpu_workspace_bytes(config, pool.model, drafts=pool.name != "target")


def divide_gpus(
    config: LLMConfig,
    target: KvPool,
    draft: KvPool | None,
    available_bytes: int,
    draft_bytes: int | None,
) -> NumBlocks:
    """Size the pools where each rank has a separate GPU, so that they are independent.

    A draft model that cannot hold all running sequences drafts for those that it can hold.
    """
    most = NumBlocks(target.most_blocks, 0 if draft is None else draft.most_blocks)
    if config.kv_cache_memory_gib is not None:
        most = fill(int(config.kv_cache_memory_gib * _GIB), target.block_bytes, draft)
    of_target = min(_gpu_blocks(config, target, most.target, available_bytes), target.most_blocks)
    if draft is None:
        return NumBlocks(of_target, 0)
    draft_bytes = available_bytes if draft_bytes is None else draft_bytes
    return NumBlocks(of_target, _gpu_blocks(config, draft, most.draft, draft_bytes))


def _gpu_blocks(config: LLMConfig, pool: KvPool, most: int, available_bytes: int) -> int:
    """Return the blocks that the fullest rank of a model can hold, at most `most`."""
    model = pool.model
    shards = model.head_shards(pool.num_ranks)
    kv_share = max(len(shard.kv) for shard in shards) / sum(len(shard.kv) for shard in shards)
    weight_share = model.largest_weight_share(pool.num_ranks)
    block_bytes = int(pool.block_bytes * kv_share)
    of_all_ranks = pool.weight_bytes + pool.extra_bytes
    weight_bytes = int(of_all_ranks * weight_share)
    workspace_bytes = gpu_workspace_bytes(config, model, drafts=pool.name != "target")
    free_bytes = available_bytes - weight_bytes - workspace_bytes
    require_room(config, model, available_bytes, free_bytes, name=pool.name, share=weight_share)
    num_blocks = min(most, max(0, free_bytes) // block_bytes)
    if num_blocks < pool.blocks_of_longest:
        needed_bytes = pool.blocks_of_longest * block_bytes
        prefix = "" if pool.name == "target" else "speculative_config."
        size = "tensor_parallel_size" if pool.name == "target" else "draft_tensor_parallel_size"
        raise OutOfMemoryError(
            f"a rank of the {pool.name} may take {available_bytes / _GIB:.1f} GiB of its GPU; "
            f"weights and workspace leave {max(0, free_bytes) / _GIB:.1f} for the KV cache, of "
            f"which {num_blocks * block_bytes / _GIB:.2f} may be used; one sequence of "
            f"{pool.max_model_len} tokens needs {needed_bytes / _GIB:.2f}: "
            f"raise {prefix}{size} or kv_cache_memory_gib, or lower {prefix}max_model_len"
        )
    return num_blocks
