"""Inputs of a forward pass whose tensors have fixed shapes and are made on the device.

A device runs such a pass as a graph, or begins it before the host knows the tokens of the step
before. `forward_batch.ModelInput` is the ragged batch that the host plans.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DeviceBatch:
    """B sequences with Q tokens each: the last known token, then draft tokens in a chain.

    A sequence with fewer than Q tokens repeats its last position; the KV of these tokens goes to a
    slot of the padding block, which no sequence reads.
    """

    input_ids: Tensor  # [B * Q] int64
    positions: Tensor  # [B * Q] int64
    slot_mapping: Tensor  # [B * Q] int64: where each token's KV is written
    block_tables: Tensor  # [B, M] int64; entries behind the context are valid blocks of the pool
    context_lens: Tensor  # [B] int64, the tokens of this pass included
    query_len: int  # Q
    adapters: Tensor | None = None  # [B * Q] int32, as in kernels.lora.AddUpdates; None: no adapter

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)


@dataclass(frozen=True)
class RaggedBatch:
    """T tokens of B sequences that may have different lengths: prompts, decodes and drafts.

    The tokens of a sequence are consecutive, in its order. Padding behind the last sequence, and
    drafts that a sequence turns out not to have, are stored in the padding block. A sequence may
    have no token.
    """

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64: where each token's KV is written
    rows: Tensor  # [T] int64: the sequence of each token; any for padding
    cu_seqlens: Tensor  # [B + 1] int32: sequence i has the tokens from cu_seqlens[i] on
    block_tables: Tensor  # [B, M] int64; entries behind the context are valid blocks of the pool
    context_lens: Tensor  # [B] int64, the tokens of this pass included
    decode_len: int
    """Most tokens of a sequence that decodes, which sizes the tiles of short queries."""
    adapters: Tensor | None = None  # [T] int32, as in DeviceBatch


AnyDeviceBatch = DeviceBatch | RaggedBatch
