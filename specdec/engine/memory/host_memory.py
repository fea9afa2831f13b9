"""Memory of hosts: the KV pools of models whose ranks run on CPUs.

Beside weights it has the processes of ranks and service, and the texts of lookups.
"""

from __future__ import annotations

from specdec.config.llm import LLMConfig
from specdec.engine.memory.kv_pools import KvPool, NumBlocks, fill
from specdec.engine.memory.weight_memory import (
    draft_state_bytes,
    extra_draft_bytes,
    extra_weight_bytes,
    require_room,
    state_bytes,
)
from specdec.engine.models.model_resolution import Models
from specdec.speculation.proposers import proposer_memory
from specdec.types.errors import OutOfMemoryError

_MIB, _GIB = 2**20, 2**30
PROCESS_BYTES = 350 * _MIB
"""Memory of a rank before it loads anything: the interpreter, torch and Ray (measured)."""
_CONTROL_PLANE_BYTES = 150 * _MIB

_MAX_AUTO_KV_BYTES = 2 * _GIB
_KV_SHARE_OF_FREE_MEMORY = 0.25


def divide_host(
    config: LLMConfig,
    models: Models,
    target: KvPool,
    draft: KvPool | None,
    available_bytes: int,
    *,
    in_process: bool,
) -> NumBlocks:
    """Size the pools where all ranks of both models share one memory."""
    parts = (_target_bytes_without_kv, draft_bytes_without_kv)
    free_bytes = available_bytes
    free_bytes -= sum(part(config, models, in_process=in_process) for part in parts)
    require_room(config, models.target, available_bytes, free_bytes)
    num_blocks = _share_of(config, target, draft, free_bytes)
    _check(config, target, draft, num_blocks, free_bytes, available_bytes)
    return num_blocks


def _share_of(
    config: LLMConfig, target: KvPool, draft: KvPool | None, free_bytes: int
) -> NumBlocks:
    """Return the blocks of pools that share the free bytes of a host.

    Without kv_cache_memory_gib they take a share of the free memory: at least what one sequence
    needs, and at most what max_num_seqs sequences fill.
    """
    if config.kv_cache_memory_gib is not None:
        return fill(int(config.kv_cache_memory_gib * _GIB), target.block_bytes, draft)
    share = int(min(free_bytes * _KV_SHARE_OF_FREE_MEMORY, _MAX_AUTO_KV_BYTES))
    found = fill(max(share, 0), target.block_bytes + _lookup_bytes_per_block(config), draft)
    num_blocks = min(max(found.target, target.blocks_of_longest), target.most_blocks)
    return NumBlocks(num_blocks, 0 if draft is None else min(num_blocks, draft.most_blocks))


def divide_hosts(
    config: LLMConfig,
    models: Models,
    target: KvPool,
    draft: KvPool,
    available_bytes: int,
    draft_bytes: int,
) -> NumBlocks:
    """Size the pools where each model has a node: the draft's has what fits of the target's."""
    free_bytes = available_bytes - _target_bytes_without_kv(config, models, in_process=False)
    require_room(config, models.target, available_bytes, free_bytes)
    if config.kv_cache_memory_gib is None:
        num_target_blocks = _share_of(config, target, None, free_bytes).target
        most = min(num_target_blocks, draft.most_blocks)
    else:
        wanted = fill(int(config.kv_cache_memory_gib * _GIB), target.block_bytes, draft)
        num_target_blocks, most = wanted.target, wanted.draft
    of_target = NumBlocks(num_target_blocks, 0)
    _check(config, target, None, of_target, free_bytes, available_bytes)
    draft_free_bytes = draft_bytes - draft_bytes_without_kv(config, models, in_process=False)
    require_room(config, draft.model, draft_bytes, draft_free_bytes, name=draft.name)
    num_blocks = min(most, max(0, draft_free_bytes) // draft.block_bytes)
    if num_blocks < draft.blocks_of_longest:
        raise OutOfMemoryError(
            f"the node of the draft model has {draft_bytes / _GIB:.1f} GiB for it, too little for "
            f"its weights and the KV cache of one sequence of {draft.max_model_len} tokens; lower "
            "speculative_config.max_model_len, or choose a smaller model"
        )
    return NumBlocks(num_target_blocks, num_blocks)


def _check(
    config: LLMConfig,
    target: KvPool,
    draft: KvPool | None,
    num_blocks: NumBlocks,
    free_bytes: int,
    available_bytes: int,
) -> None:
    kv_bytes = num_blocks.target * target.block_bytes
    longest_bytes = target.blocks_of_longest * target.block_bytes
    if draft is not None:
        kv_bytes += num_blocks.draft * draft.block_bytes
        longest_bytes += draft.blocks_of_longest * draft.block_bytes
    if num_blocks.target < target.blocks_of_longest:
        raise OutOfMemoryError(
            f"the KV cache would have {kv_bytes / _MIB:.1f} MiB; one sequence of max_model_len "
            f"needs {longest_bytes / _MIB:.1f}: raise kv_cache_memory_gib or lower max_model_len"
        )
    missing = kv_bytes + num_blocks.target * _lookup_bytes_per_block(config) - free_bytes
    if missing > 0:
        is_given = config.kv_cache_memory_gib is not None
        lower = "kv_cache_memory_gib" if is_given else "max_model_len"
        raise OutOfMemoryError(
            f"weights, processes and KV cache need {(available_bytes + missing) / _GIB:.1f} GiB, "
            f"and {available_bytes / _GIB:.1f} GiB are free; the KV cache has "
            f"{kv_bytes / _GIB:.1f} of them: lower {lower}"
        )


def _target_bytes_without_kv(config: LLMConfig, models: Models, *, in_process: bool) -> int:
    """Return the bytes of the target's weights and states, of processes, and of proposers.

    In the caller's process there is one process for all; else each rank and the service have one,
    without draft ranks.
    """
    processes = (config.tensor_parallel_size + 1) * PROCESS_BYTES + _CONTROL_PLANE_BYTES
    memory = proposer_memory(config.speculative_config)
    return (
        models.target.weight_bytes(config.resolved_dtype, config.quantization_method)
        + extra_weight_bytes(config, models)
        + state_bytes(config, models.target)
        + (PROCESS_BYTES if in_process else processes)
        + memory.fixed_bytes
        + config.max_num_seqs * memory.bytes_per_sequence
    )


def draft_bytes_without_kv(config: LLMConfig, models: Models, *, in_process: bool) -> int:
    """Return the bytes of the draft model's weights and of its ranks' processes; 0 without one."""
    drafting = config.draft_model
    if models.draft is None or drafting is None:
        return 0
    num_ranks = drafting.draft_tensor_parallel_size + config.num_spare_ranks
    weights = models.draft.weight_bytes(config.resolved_dtype, drafting.quantization)
    weights += extra_draft_bytes(config, models) + draft_state_bytes(config, models)
    return weights + (0 if in_process else num_ranks * PROCESS_BYTES)


def _lookup_bytes_per_block(config: LLMConfig) -> int:
    """Return the bytes that lookups store for the text of one KV block of the target.

    Sequences that share the KV of a prompt each store its text; the memory beyond the KV pool's
    share holds that.
    """
    return config.block_size * proposer_memory(config.speculative_config).bytes_per_token
