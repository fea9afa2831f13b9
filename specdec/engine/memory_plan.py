"""Divides an engine's memory among weights, processes, proposers and the KV of both models.

"auto" is resolved here, before anything is started, so that neither model runs out of memory later.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from specdec.config.engine import DraftLimits, EngineConfig
from specdec.config.llm import LLMConfig
from specdec.config.quantization import QuantizationMethod
from specdec.engine.gpu_workspace import gpu_workspace_bytes
from specdec.engine.model_limits import check_model_limits, draft_adapter_limits
from specdec.engine.model_resolution import Models
from specdec.engine.weight_memory import (
    draft_block_bytes,
    extra_draft_bytes,
    extra_weight_bytes,
    head_bytes_per_token,
    weight_bytes,
)
from specdec.models.config import ModelConfig
from specdec.speculation.proposers import proposer_memory
from specdec.types.errors import InvalidValueError, OutOfMemoryError
from specdec.types.validation import require_range

_MIB, _GIB = 2**20, 2**30
PROCESS_BYTES = 350 * _MIB
"""Memory of a rank before it loads anything: the interpreter, torch and Ray (measured)."""
_CONTROL_PLANE_BYTES = 150 * _MIB

_MAX_AUTO_KV_BYTES = 2 * _GIB
_KV_SHARE_OF_FREE_MEMORY = 0.25


@dataclass(frozen=True)
class MemoryPlan:
    """The limits of the engine and of the draft model, which share a machine's memory."""

    engine: EngineConfig
    draft: DraftLimits | None


@dataclass(frozen=True)
class _Pool:
    """The KV pool of one model.

    num_ranks: ranks that share it. block_bytes: size of a block on all of them together.
    blocks_of_longest: blocks of one sequence of max_model_len. most_blocks: blocks that
    max_num_seqs such sequences fill. weight_bytes: of the model. extra_bytes: weights of all loaded
    versions of a draft head and of adapters. Both on all ranks together.
    """

    name: str
    model: ModelConfig
    num_ranks: int
    block_bytes: int
    max_model_len: int
    blocks_of_longest: int
    most_blocks: int
    weight_bytes: int
    extra_bytes: int = 0


@dataclass(frozen=True)
class _NumBlocks:
    """Sizes of both KV pools in blocks; 0 for the draft where there is no draft model."""

    target: int
    draft: int


def memory_plan(
    config: LLMConfig,
    models: Models,
    available_bytes: int,
    draft_bytes: int | None = None,
    *,
    in_process: bool = False,
) -> MemoryPlan:
    """Return the limits of the engine and of the draft model, with every "auto" resolved.

    draft_bytes: memory of the draft model where it is on another node than the target.
    in_process: whether the models run in the caller's process, rather than each rank in a separate
    one beside a service's.

    Where both models share one memory, the draft's pool has as many blocks as the target's, so that
    every running sequence fits into both, but no more than sequences of its max_model_len fill.
    Where each rank has a separate GPU, each pool is as large as the fullest of its GPUs allows; in
    one process both models are on one GPU, and elsewhere with `share_gpu`.
    Raises InvalidValueError for a context longer than the model's and for settings that a model
    does not have, and OutOfMemoryError when the
    weights, the processes and the KV pools do not fit in `available_bytes`.
    """
    check_model_limits(config, models)
    target, draft = _target_pool(config, models), _draft_pool(config, models)
    if config.device == "cuda" and draft is not None and (in_process or config.shares_gpu):
        num_blocks = _divide_gpu(config, target, draft, available_bytes)
    elif config.device == "cuda":
        num_blocks = _divide_gpus(config, target, draft, available_bytes, draft_bytes)
    elif draft is not None and draft_bytes is not None:
        num_blocks = _divide_hosts(config, models, target, draft, available_bytes, draft_bytes)
    else:
        parts = (_target_bytes_without_kv, _draft_bytes_without_kv)
        free_bytes = available_bytes
        free_bytes -= sum(part(config, models, in_process=in_process) for part in parts)
        num_blocks = _divide_host(config, target, draft, free_bytes)
        _check_host(config, target, draft, num_blocks, free_bytes, available_bytes)
    return MemoryPlan(
        _engine_config(config, target, num_blocks.target, in_process=in_process),
        None if draft is None else _draft_limits(config, draft, num_blocks.draft),
    )


def _engine_config(
    config: LLMConfig, pool: _Pool, num_blocks: int, *, in_process: bool
) -> EngineConfig:
    speculation = config.speculative_config
    return EngineConfig(
        max_model_len=pool.max_model_len,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_prefill_tokens=config.prefill_limit,
        max_queue_len=config.max_queue_len,
        enable_prefix_caching=config.enable_prefix_caching,
        stream_interval=config.stream_interval,
        # In the process of the caller only a GPU runs a step while the engine schedules the next,
        # and a draft model does not run while the target does.
        async_scheduling=config.async_scheduling and (config.device == "cuda" or not in_process),
        enforce_eager=config.enforce_eager,
        deterministic=config.deterministic,
        compare_ranks=config.compare_ranks,
        kv_cache_dtype=config.kv_cache_dtype,
        speculation=speculation.without_drafts_ahead if in_process and speculation else speculation,
        adapters=config.adapter_limits,
    )


def _draft_limits(config: LLMConfig, pool: _Pool, num_blocks: int) -> DraftLimits:
    drafting = config.draft_model
    assert drafting is not None, "limits of a draft model that is not configured"
    if drafting.parallel_drafting and pool.model.mask_token_id is None:
        limit = "left out: config.json of the draft model has no pard_token, so it is not trained "
        limit += "for parallel drafting"
        raise InvalidValueError("speculative_config.parallel_drafting", True, limit)
    return DraftLimits(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=pool.max_model_len,
        max_catch_up_tokens=config.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        confidence_threshold=drafting.draft_confidence_threshold,
        parallel_drafting=drafting.parallel_drafting,
        draft_window=drafting.draft_window,
        token_map=drafting.speculative_token_map,
        max_num_seqs=config.max_num_seqs,
        enforce_eager=config.enforce_eager,
        compare_ranks=config.compare_ranks,
        kv_cache_dtype=config.kv_cache_dtype,
        adapters=draft_adapter_limits(config, pool.model),
    )


def _target_pool(config: LLMConfig, models: Models) -> _Pool:
    model = models.target
    max_model_len = config.max_model_len or model.max_position_embeddings
    require_range("max_model_len", max_model_len, 2, model.max_position_embeddings)
    size, method = config.tensor_parallel_size, config.quantization_method
    pool = _pool(config, "target", model, size, max_model_len, method)
    block_bytes = pool.block_bytes + config.block_size * head_bytes_per_token(config, models)
    extra_bytes = extra_weight_bytes(config, models) + draft_block_bytes(config, models)
    return replace(pool, block_bytes=block_bytes, extra_bytes=extra_bytes)


def _draft_pool(config: LLMConfig, models: Models) -> _Pool | None:
    """Return the draft model's pool; its sequences may be shorter than the target's, not longer."""
    model, drafting = models.draft, config.draft_model
    if model is None or drafting is None:
        return None
    max_model_len = min(
        config.max_model_len or models.target.max_position_embeddings,
        drafting.max_model_len or model.max_position_embeddings,
        model.max_position_embeddings,
    )
    size = drafting.draft_tensor_parallel_size
    pool = _pool(config, "draft model", model, size, max_model_len, drafting.quantization)
    return replace(pool, extra_bytes=extra_draft_bytes(config, models))


def _pool(
    config: LLMConfig,
    name: str,
    model: ModelConfig,
    num_ranks: int,
    max_model_len: int,
    quantization: QuantizationMethod | None,
) -> _Pool:
    blocks_of_longest = -(-max_model_len // config.block_size)
    return _Pool(
        name=name,
        model=model,
        num_ranks=num_ranks,
        block_bytes=config.block_size
        * model.kv_bytes_per_token(config.resolved_dtype, num_ranks, config.kv_cache_dtype),
        max_model_len=max_model_len,
        blocks_of_longest=blocks_of_longest,
        most_blocks=config.max_num_seqs * blocks_of_longest,
        weight_bytes=weight_bytes(config, model, num_ranks, quantization),
    )


def _fill(num_bytes: int, target_bytes: int, draft: _Pool | None) -> _NumBlocks:
    """Divide `num_bytes` into blocks; target_bytes: of a block of the target."""
    if draft is None:
        return _NumBlocks(num_bytes // target_bytes, 0)
    of_both = num_bytes // (target_bytes + draft.block_bytes)
    if of_both <= draft.most_blocks:
        return _NumBlocks(of_both, of_both)
    rest = num_bytes - draft.most_blocks * draft.block_bytes
    return _NumBlocks(rest // target_bytes, draft.most_blocks)


def _divide_host(
    config: LLMConfig, target: _Pool, draft: _Pool | None, free_bytes: int
) -> _NumBlocks:
    """Size the pools where all ranks of both models share one memory.

    Without kv_cache_memory_gib they take a share of the free memory: at least what one sequence
    needs, and at most what max_num_seqs sequences fill.
    """
    if config.kv_cache_memory_gib is not None:
        return _fill(int(config.kv_cache_memory_gib * _GIB), target.block_bytes, draft)
    share = int(min(free_bytes * _KV_SHARE_OF_FREE_MEMORY, _MAX_AUTO_KV_BYTES))
    found = _fill(max(share, 0), target.block_bytes + _lookup_bytes_per_block(config), draft)
    num_blocks = min(max(found.target, target.blocks_of_longest), target.most_blocks)
    return _NumBlocks(num_blocks, 0 if draft is None else min(num_blocks, draft.most_blocks))


def _divide_hosts(
    config: LLMConfig,
    models: Models,
    target: _Pool,
    draft: _Pool,
    available_bytes: int,
    draft_bytes: int,
) -> _NumBlocks:
    """Size the pools where each model has a node: the draft's has what fits of the target's."""
    free_bytes = available_bytes - _target_bytes_without_kv(config, models, in_process=False)
    if config.kv_cache_memory_gib is None:
        num_target_blocks = _divide_host(config, target, None, free_bytes).target
        most = min(num_target_blocks, draft.most_blocks)
    else:
        wanted = _fill(int(config.kv_cache_memory_gib * _GIB), target.block_bytes, draft)
        num_target_blocks, most = wanted.target, wanted.draft
    of_target = _NumBlocks(num_target_blocks, 0)
    _check_host(config, target, None, of_target, free_bytes, available_bytes)
    draft_free_bytes = draft_bytes - _draft_bytes_without_kv(config, models, in_process=False)
    num_blocks = min(most, max(0, draft_free_bytes) // draft.block_bytes)
    if num_blocks < draft.blocks_of_longest:
        raise OutOfMemoryError(
            f"the node of the draft model has {draft_bytes / _GIB:.1f} GiB for it, too little for "
            f"its weights and the KV cache of one sequence of {draft.max_model_len} tokens; lower "
            "speculative_config.max_model_len, or choose a smaller model"
        )
    return _NumBlocks(num_target_blocks, num_blocks)


def _check_host(
    config: LLMConfig,
    target: _Pool,
    draft: _Pool | None,
    num_blocks: _NumBlocks,
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
        raise OutOfMemoryError(
            f"weights, processes and KV cache need {(available_bytes + missing) / _GIB:.1f} GiB, "
            f"and {available_bytes / _GIB:.1f} GiB are free; lower kv_cache_memory_gib or "
            "max_model_len, or choose a smaller model"
        )


def _target_bytes_without_kv(config: LLMConfig, models: Models, *, in_process: bool) -> int:
    """Return the bytes of the target's weights, of processes other than draft ranks, and proposers.

    In the caller's process there is one process for all; else each rank and the service have one.
    """
    processes = (config.tensor_parallel_size + 1) * PROCESS_BYTES + _CONTROL_PLANE_BYTES
    memory = proposer_memory(config.speculative_config)
    return (
        models.target.weight_bytes(config.resolved_dtype, config.quantization_method)
        + extra_weight_bytes(config, models)
        + (PROCESS_BYTES if in_process else processes)
        + memory.fixed_bytes
        + config.max_num_seqs * memory.bytes_per_sequence
    )


def _draft_bytes_without_kv(config: LLMConfig, models: Models, *, in_process: bool) -> int:
    drafting = config.draft_model
    if models.draft is None or drafting is None:
        return 0
    num_ranks = drafting.draft_tensor_parallel_size + config.num_spare_ranks
    weights = models.draft.weight_bytes(config.resolved_dtype, drafting.quantization)
    weights += extra_draft_bytes(config, models)
    return weights + (0 if in_process else num_ranks * PROCESS_BYTES)


def _lookup_bytes_per_block(config: LLMConfig) -> int:
    """Return the bytes that lookups store for the text of one KV block of the target.

    Sequences that share the KV of a prompt each store its text; the memory beyond the KV pool's
    share holds that.
    """
    return config.block_size * proposer_memory(config.speculative_config).bytes_per_token


def _divide_gpu(config: LLMConfig, target: _Pool, draft: _Pool, available_bytes: int) -> _NumBlocks:
    """Size the pools where both models, with one rank each, share one GPU."""
    without_kv = sum(_gpu_bytes_without_kv(config, pool) for pool in (target, draft))
    free_bytes = max(0, available_bytes - without_kv)
    if config.kv_cache_memory_gib is not None:
        free_bytes = min(free_bytes, int(config.kv_cache_memory_gib * _GIB))
    fitting = _fill(free_bytes, target.block_bytes, draft)
    found = _NumBlocks(min(fitting.target, target.most_blocks), fitting.draft)
    if found.target < target.blocks_of_longest or found.draft < draft.blocks_of_longest:
        needed = sum(pool.blocks_of_longest * pool.block_bytes for pool in (target, draft))
        raise OutOfMemoryError(
            f"target and draft model may take {available_bytes / _GIB:.1f} GiB of the GPU that "
            f"they share; weights and workspaces leave {free_bytes / _GIB:.2f} for both KV caches, "
            f"and one sequence of max_model_len needs {needed / _GIB:.2f}: lower max_model_len, "
            "max_num_seqs or max_num_batched_tokens, or draft on another GPU or without a model"
        )
    return found


def _gpu_bytes_without_kv(config: LLMConfig, pool: _Pool) -> int:
    """Return the bytes of a model's only rank on its GPU beside the KV pool."""
    weights = pool.weight_bytes + pool.extra_bytes
    return weights + gpu_workspace_bytes(config, pool.model, drafts=pool.name != "target")


def _divide_gpus(
    config: LLMConfig,
    target: _Pool,
    draft: _Pool | None,
    available_bytes: int,
    draft_bytes: int | None,
) -> _NumBlocks:
    """Size the pools where each rank has a separate GPU, so that they are independent.

    A draft model that cannot hold all running sequences drafts for those that it can hold.
    """
    most = _NumBlocks(target.most_blocks, 0 if draft is None else draft.most_blocks)
    if config.kv_cache_memory_gib is not None:
        most = _fill(int(config.kv_cache_memory_gib * _GIB), target.block_bytes, draft)
    of_target = min(_gpu_blocks(config, target, most.target, available_bytes), target.most_blocks)
    if draft is None:
        return _NumBlocks(of_target, 0)
    draft_bytes = available_bytes if draft_bytes is None else draft_bytes
    return _NumBlocks(of_target, _gpu_blocks(config, draft, most.draft, draft_bytes))


def _gpu_blocks(config: LLMConfig, pool: _Pool, most: int, available_bytes: int) -> int:
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
