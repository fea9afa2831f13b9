"""What one forward pass reads: a flat batch of tokens over paged KV."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Indices = NDArray[np.int32]


@dataclass(frozen=True)
class Chunk:
    """The tokens of one sequence that a pass runs.

    start: how many tokens before them have KV. block_table: of the sequence, in order; it reaches
    to the last of the tokens at least.
    """

    token_ids: Many[int]
    start: int
    block_table: Many[int] | Indices

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class ModelInput:
    """One flat batch of T tokens of B sequences: prefill chunks, decode rows and drafts alike.

    Sequence i owns the tokens cu_seqlens_q[i] to cu_seqlens_q[i+1]; they are the last ones of its
    context_lens[i] tokens, and its earlier KV is in the blocks that block_tables[i] names. The
    arrays are the host's, since it plans with them before anything runs on a device.
    """

    input_ids: Indices  # [T]
    positions: Indices  # [T]
    slot_mapping: Indices  # [T]: block * block_size + offset, where the token's KV is written
    cu_seqlens_q: Indices  # [B + 1]
    context_lens: Indices  # [B], the tokens of this pass included
    block_tables: Indices  # [B, M], padded with block 0
    block_size: int

    @classmethod
    def of(cls, chunks: Many[Chunk], block_size: int) -> ModelInput:
        """The batch of `chunks`, in their order; at least one, and a token each."""
        lengths = [len(chunk.token_ids) for chunk in chunks]
        bounds = np.zeros(len(chunks) + 1, np.int32)
        np.cumsum(lengths, out=bounds[1:])
        ends = np.array([chunk.end for chunk in chunks], np.int32)
        tables = _padded_tables(chunks, block_size)
        positions = np.arange(bounds[-1], dtype=np.int32)
        positions += np.repeat(ends - bounds[1:], lengths)
        index, offset = np.divmod(positions, block_size)
        owners = np.repeat(np.arange(len(chunks)), lengths)
        return cls(
            input_ids=np.array([token for chunk in chunks for token in chunk.token_ids], np.int32),
            positions=positions,
            slot_mapping=tables[owners, index] * np.int32(block_size) + offset,
            cu_seqlens_q=bounds,
            context_lens=ends,
            block_tables=tables,
            block_size=block_size,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)

    def query_len(self, index: int) -> int:
        """How many tokens of this pass belong to sequence `index`."""
        return int(self.cu_seqlens_q[index + 1] - self.cu_seqlens_q[index])


def on_device(indices: Indices, device: torch.device) -> torch.Tensor:
    """The same numbers in int64, which torch's indexing wants."""
    return torch.from_numpy(indices).to(device=device, dtype=torch.int64)


def _padded_tables(chunks: Many[Chunk], block_size: int) -> Indices:
    counts = [-(-chunk.end // block_size) for chunk in chunks]
    tables = np.zeros((len(chunks), max(counts)), np.int32)
    for row, chunk, count in zip(tables, chunks, counts, strict=True):
        row[:count] = chunk.block_table[:count]
    return tables
