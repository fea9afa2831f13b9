"""What one forward pass reads: a flat batch of tokens over paged KV."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ModelInput:
    """One flat batch of T tokens of B sequences: prefill chunks, decode rows and drafts alike.

    Sequence i owns the tokens cu_seqlens_q[i] to cu_seqlens_q[i+1]; they are the last ones of its
    context_lens[i] tokens, and its earlier KV is in the blocks that block_tables[i] names. The
    lengths are plain integers because the host plans with them before anything runs on a device.
    """

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64: block * block_size + offset, where the token's KV is written
    cu_seqlens_q: tuple[int, ...]  # B + 1
    context_lens: tuple[int, ...]  # B, the tokens of this pass included
    block_tables: Tensor  # [B, M] int64, padded with any valid block

    @property
    def num_tokens(self) -> int:
        return self.cu_seqlens_q[-1]

    def query_len(self, index: int) -> int:
        """How many tokens of this pass belong to sequence `index`."""
        return self.cu_seqlens_q[index + 1] - self.cu_seqlens_q[index]
