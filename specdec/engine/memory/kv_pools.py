"""The KV pools of target and draft model: sizes of their blocks, and blocks that fill memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specdec.config.engine import snapshot_interval
from specdec.config.llm import LLMConfig
from specdec.config.quantization import QuantizationMethod
from specdec.engine.memory.weight_memory import (
    draft_block_bytes,
    draft_state_bytes,
    extra_draft_bytes,
    extra_weight_bytes,
    head_bytes_per_token,
    state_bytes,
    weight_bytes,
)
from specdec.engine.models.model_resolution import Models
from specdec.models.config.decoder_tensors import in_context
from specdec.models.config.model_config import ModelConfig
from specdec.models.config.recurrent import Recurrent
from specdec.types.validation import require_range


@dataclass(frozen=True)
class KvPool:
    """The KV pool of one model.

    num_ranks: ranks that share it. block_bytes: size of a block on all of them together.
    blocks_of_longest: blocks of one sequence of max_model_len. most_blocks: blocks that
    max_num_seqs such sequences fill. weight_bytes: of the model. extra_bytes: weights of all loaded
    versions of a draft head and of adapters, the head's KV after the pool, and the states of all
    running sequences. Both on all ranks together.
    state_bytes: of a sequence's states on all ranks. snapshot_interval: blocks whose bytes include
    those of a snapshot of states; None without snapshots.
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
    state_bytes: int = 0
    snapshot_interval: int | None = None

    def num_snapshots(self, num_blocks: int) -> int:
        """Return the snapshots of states beside a number of blocks."""
        return max(1, num_blocks // self.snapshot_interval) if self.snapshot_interval else 0


@dataclass(frozen=True)
class NumBlocks:
    """Sizes of both KV pools in blocks; 0 for the draft where there is no draft model."""

    target: int
    draft: int


def target_pool(config: LLMConfig, models: Models) -> KvPool:
    """Return the target's pool. Raises InvalidValueError for a context that is too long."""
    model = models.target
    max_model_len = config.max_model_len or model.max_position_embeddings
    require_range("max_model_len", max_model_len, 2, model.max_position_embeddings)
    size, method = config.tensor_parallel_size, config.quantization_method
    pool = _pool(config, "target", model, size, max_model_len, method)
    block_bytes = pool.block_bytes + config.block_size * head_bytes_per_token(config, models)
    extra_bytes = extra_weight_bytes(config, models) + draft_block_bytes(config, models)
    extra_bytes += state_bytes(config, model)
    pool = replace(pool, block_bytes=block_bytes, extra_bytes=extra_bytes)
    return pool if model.recurrent is None else _with_states(config, pool, model.recurrent)


def _with_states(config: LLMConfig, pool: KvPool, recurrent: Recurrent) -> KvPool:
    """Return the pool with the bytes of snapshots in those of blocks, where the cache needs any."""
    of_sequence = recurrent.state_bytes(config.resolved_dtype, pool.num_ranks)
    pool = replace(pool, state_bytes=of_sequence)
    if not config.enable_prefix_caching:
        return pool
    interval = snapshot_interval(of_sequence, pool.block_bytes)
    block_bytes = pool.block_bytes + -(-of_sequence // interval)
    return replace(pool, block_bytes=block_bytes, snapshot_interval=interval)


def draft_pool(config: LLMConfig, models: Models) -> KvPool | None:
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
    extra_bytes = extra_draft_bytes(config, models) + draft_state_bytes(config, models)
    return replace(pool, extra_bytes=extra_bytes)


def _pool(
    config: LLMConfig,
    name: str,
    model: ModelConfig,
    num_ranks: int,
    max_model_len: int,
    quantization: QuantizationMethod | None,
) -> KvPool:
    blocks_of_longest = -(-max_model_len // config.block_size)
    model = in_context(model, max_model_len)
    return KvPool(
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


def fill(num_bytes: int, target_bytes: int, draft: KvPool | None) -> NumBlocks:
    """Divide `num_bytes` into blocks; target_bytes: of a block of the target."""
    if draft is None:
        return NumBlocks(num_bytes // target_bytes, 0)
    of_both = num_bytes // (target_bytes + draft.block_bytes)
    if of_both <= draft.most_blocks:
        return NumBlocks(of_both, of_both)
    rest = num_bytes - draft.most_blocks * draft.block_bytes
    return NumBlocks(rest // target_bytes, draft.most_blocks)
