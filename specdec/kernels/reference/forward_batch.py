"""Input and output of a forward pass over a flat batch of tokens with paged KV."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.types.drafts.draft_tree import Parents, depths
from specdec.types.messages import BASE_MODEL

Indices = NDArray[np.int32]


class Chunk(NamedTuple):
    """The tokens of one sequence that a pass runs.

    start: number of tokens before them, which have KV. block_table: of the sequence, in order, at
    least up to the last of the tokens. An array of 32 bits ("i") is not copied.
    parents: where the last tokens are a tree of drafts, the parent of each of them
    (`types.drafts.draft_tree`); the base is the token before the first one. A tree may have more
    nodes than the chunk has tokens: the KV of its first nodes exists.
    adapter_id: of the adapter that the pass runs the tokens with; BASE_MODEL for none.
    num_guesses: last tokens that may be rejected after the pass. state_slot: of the sequence's
    states in recurrent layers. Other layers need neither.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int] | array[int]
    parents: Parents | None = None
    adapter_id: int = BASE_MODEL
    num_guesses: int = 0
    state_slot: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def num_nodes(self) -> int:
        """Tokens of a tree of drafts."""
        return len(self.parents or ())

    @property
    def positions(self) -> Sequence[int]:
        """Position ids of the tokens: consecutive up to the base of a tree, then by depth."""
        if self.parents is None:
            return range(self.start, self.end)
        first_slot = self.end - self.num_nodes
        by_depth = [first_slot - 1 + depth for depth in depths(self.parents)]
        return (*range(self.start, first_slot), *by_depth[-len(self.token_ids) :])


def slots_of(block_table: Sequence[int], positions: range, block_size: int) -> list[int]:
    """Return the slots of a sequence's tokens in the pool: block * block_size + offset."""
    return [
        block_table[position // block_size] * block_size + position % block_size
        for position in positions
    ]


class AdapterRun(NamedTuple):
    """Consecutive tokens of a flat batch, from `begin` up to `end`, with the same adapter."""

    adapter_id: int
    begin: int
    end: int


def adapter_runs(tokens: Iterable[tuple[int, int]]) -> list[AdapterRun]:
    """Return the longest runs of tokens with an adapter, in order.

    tokens: the adapter id of consecutive tokens of a flat batch, and their number.
    """
    runs: list[AdapterRun] = []
    end = 0
    for adapter_id, count in tokens:
        begin, end = end, end + count
        if adapter_id == BASE_MODEL or not count:
            continue
        last = runs[-1] if runs else None
        if last is not None and last.end == begin and last.adapter_id == adapter_id:
            runs[-1] = last._replace(end=end)
        else:
            runs.append(AdapterRun(adapter_id, begin, end))
    return runs


class SlotMove(NamedTuple):
    """A copy of the KV of one token between two slots (block * block_size + offset)."""

    source: int
    target: int


@dataclass(frozen=True)
class ForwardBatch:
    """One flat batch of T tokens of B sequences: prefill chunks, decode rows and drafts alike.

    Sequence i owns the tokens cu_seqlens_q[i] to cu_seqlens_q[i+1]; they are the last ones of its
    context_lens[i] tokens, and its earlier KV is in the blocks block_tables[i]. The arrays are on
    the host, which plans with them before anything runs on a device, and made on demand: the native
    kernels read the chunks.
    """

    chunks: Sequence[Chunk]  # at least one, and a token each
    block_size: int

    @cached_property
    def input_ids(self) -> Indices:
        """[T]."""
        return np.array([token for chunk in self.chunks for token in chunk.token_ids], np.int32)

    @cached_property
    def cu_seqlens_q(self) -> Indices:
        """[B + 1]."""
        bounds = np.zeros(len(self.chunks) + 1, np.int32)
        np.cumsum(self._query_lens, out=bounds[1:])
        return bounds

    @property
    def last_tokens(self) -> list[int]:
        """Index of the last token of each sequence."""
        return [end - 1 for end in accumulate(self._query_lens)]

    @cached_property
    def context_lens(self) -> Indices:
        """[B], the tokens of this pass included."""
        return np.array([chunk.end for chunk in self.chunks], np.int32)

    @cached_property
    def slots(self) -> Indices:
        """[T]: index of each token's KV within its sequence."""
        slots = np.arange(self.num_tokens, dtype=np.int32)
        slots += np.repeat(self.context_lens - self.cu_seqlens_q[1:], self._query_lens)
        return slots

    @cached_property
    def positions(self) -> Indices:
        """[T]: position ids, for rotary embeddings; the slots in chains of tokens."""
        if not self.has_trees:
            return self.slots
        own = (chunk.positions for chunk in self.chunks)
        return np.array([position for each in own for position in each], np.int32)

    @property
    def has_trees(self) -> bool:
        """Return whether some sequence ends in a tree of drafts."""
        return any(chunk.parents is not None for chunk in self.chunks)

    @cached_property
    def slot_mapping(self) -> Indices:
        """[T]: block * block_size + offset, where the token's KV is written."""
        index, offset = np.divmod(self.slots, self.block_size)
        owners = np.repeat(np.arange(self.num_sequences), self._query_lens)
        slots: Indices = self.block_tables[owners, index] * np.int32(self.block_size) + offset
        return slots

    @cached_property
    def block_tables(self) -> Indices:
        """[B, M], padded with block 0."""
        counts = [-(-chunk.end // self.block_size) for chunk in self.chunks]
        tables = np.zeros((len(self.chunks), max(counts)), np.int32)
        for row, chunk, count in zip(tables, self.chunks, counts, strict=True):
            row[:count] = chunk.block_table[:count]
        return tables

    @property
    def adapter_runs(self) -> list[AdapterRun]:
        """The longest runs of tokens with an adapter, in order.

        Any order of the sequences is right. Where those of an adapter are adjacent, as the engine
        sends them, its matrices are read once.
        """
        return adapter_runs((chunk.adapter_id, len(chunk.token_ids)) for chunk in self.chunks)

    @cached_property
    def num_tokens(self) -> int:
        """T."""
        return sum(self._query_lens)

    @property
    def num_sequences(self) -> int:
        return len(self.chunks)

    def query_len(self, index: int) -> int:
        """Return the number of tokens of sequence `index` in this pass."""
        return self._query_lens[index]

    @cached_property
    def _query_lens(self) -> list[int]:
        return [len(chunk.token_ids) for chunk in self.chunks]


class PairInputs(NamedTuple):
    """T pairs that a draft head runs (`models.heads.networks.base`), for drafts after them.

    features: [T, feature_size], of the token before each; None or empty for a draft model, whose
    pairs are tokens. kv_cache: receives the KV of the pairs.
    """

    pairs: ForwardBatch
    features: Tensor | None
    kv_cache: Tensor


class HiddenStates(NamedTuple):
    """Output of a forward pass with taps.

    final: after the final norm. tapped: the residual stream that enters each tapped layer, where
    layer num_layers is the output of the last layer before the final norm.
    """

    final: Tensor  # [T, hidden_size]
    tapped: Tensor  # [T, num_taps, hidden_size]


def on_device(indices: Indices, device: torch.device) -> Tensor:
    """Copy `indices` to a device as int64, the type of torch's indices; do not wait for a GPU."""
    host = torch.from_numpy(indices).to(torch.int64)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
