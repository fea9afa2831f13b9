"""Divides an engine's memory among weights, processes, proposers and the KV of both models.

"auto" is resolved here, before anything is started, so that neither model runs out of memory later.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.config.engine import LEAST_SNAPSHOT_INTERVAL, DraftLimits, EngineConfig
from specdec.config.gpu.graph_sizes import most_padding_tokens
from specdec.config.llm import LLMConfig
from specdec.engine.memory.gpu_memory import divide_gpu, divide_gpus
from specdec.engine.memory.host_memory import divide_host, divide_hosts
from specdec.engine.memory.kv_pools import KvPool, draft_pool, target_pool
from specdec.engine.memory.rank_lookups import served_speculation
from specdec.engine.memory.weight_memory import state_bytes
from specdec.engine.models.model_limits import check_model_limits, draft_adapter_limits
from specdec.engine.models.model_resolution import Models
from specdec.types.errors import InvalidValueError
from specdec.types.sampling.sampling_params import MAX_NUM_SPECULATIVE_TOKENS


@dataclass(frozen=True)
class MemoryPlan:
    """The limits of the engine and of the draft model, which share a machine's memory.

    state_bytes: of the states of recurrent layers.
    """

    engine: EngineConfig
    draft: DraftLimits | None
    state_bytes: int = 0

    def describe(self) -> str:
        """Return the sizes in one line for the log."""
        engine = self.engine
        text = f"KV of {engine.num_blocks} blocks of {engine.block_size} tokens"
        if self.draft is not None:
            text += f" ({self.draft.num_blocks} for the draft model)"
        if self.state_bytes:
            text += f", states of {self.state_bytes / 2**20:.1f} MiB"
        if engine.num_snapshots:
            snapshot_bytes = engine.num_snapshots * engine.state_bytes
            text += f", {engine.num_snapshots} snapshots of {snapshot_bytes / 2**20:.1f} MiB"
        limits = f"{engine.max_num_seqs} sequences of at most {engine.max_model_len} tokens"
        return f"{text}, {limits}"


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
    does not have, and OutOfMemoryError when the weights, the processes and the KV pools do not fit
    in `available_bytes`.
    """
    check_model_limits(config, models)
    target, draft = target_pool(config, models), draft_pool(config, models)
    if config.device == "cuda" and draft is not None and (in_process or config.shares_gpu):
        num_blocks = divide_gpu(config, target, draft, available_bytes)
    elif config.device == "cuda":
        num_blocks = divide_gpus(config, target, draft, available_bytes, draft_bytes)
    elif draft is not None and draft_bytes is not None:
        num_blocks = divide_hosts(config, models, target, draft, available_bytes, draft_bytes)
    else:
        num_blocks = divide_host(
            config, models, target, draft, available_bytes, in_process=in_process
        )
    return MemoryPlan(
        _engine_config(config, target, draft, num_blocks.target, in_process=in_process),
        None if draft is None else _draft_limits(config, draft, num_blocks.draft),
        state_bytes(config, models.target),
    )


def _engine_config(
    config: LLMConfig, pool: KvPool, draft: KvPool | None, num_blocks: int, *, in_process: bool
) -> EngineConfig:
    speculation = served_speculation(config, pool.model)
    is_hybrid = pool.model.recurrent is not None
    has_no_branches = draft is not None and draft.model.recurrent is not None
    if speculation is not None and (in_process or has_no_branches):
        speculation = speculation.without_drafts_ahead
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
        speculation=speculation,
        adapters=config.adapter_limits,
        keeps_guesses=is_hybrid,
        state_bytes=pool.state_bytes,
        num_snapshots=pool.num_snapshots(num_blocks),
        snapshot_interval=pool.snapshot_interval or LEAST_SNAPSHOT_INTERVAL,
        most_padding_tokens=(
            most_padding_tokens(pool.model.hidden_size) if config.device == "cuda" else 0
        ),
    )


def _draft_limits(config: LLMConfig, pool: KvPool, num_blocks: int) -> DraftLimits:
    drafting = config.draft_model
    assert drafting is not None, "limits of a draft model that is not configured"
    if drafting.parallel_drafting and pool.model.mask_token_id is None:
        limit = "left out: config.json of the draft model has no pard_token, so it is not trained "
        limit += "for parallel drafting"
        raise InvalidValueError("speculative_config.parallel_drafting", True, limit)
    speculation, is_hybrid = config.speculative_config, pool.model.recurrent is not None
    most = MAX_NUM_SPECULATIVE_TOKENS
    if is_hybrid and speculation is not None:
        most = speculation.max_chain_guesses
    return DraftLimits(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=pool.max_model_len,
        max_catch_up_tokens=config.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching and not is_hybrid,
        confidence_threshold=drafting.draft_confidence_threshold,
        parallel_drafting=drafting.parallel_drafting,
        draft_window=drafting.draft_window,
        token_map=drafting.speculative_token_map,
        max_num_seqs=config.max_num_seqs,
        enforce_eager=config.enforce_eager,
        compare_ranks=config.compare_ranks,
        kv_cache_dtype=config.kv_cache_dtype,
        adapters=draft_adapter_limits(config, pool.model),
        max_draft_tokens=most,
    )
