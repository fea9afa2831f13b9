"""Plans of paged attention on a GPU: the tiles of queries, and what kernels read about a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.config.gpu.attention_splits import (
    MAX_SHORT_QUERY_TOKENS,
    SHORT_TILES,
    enough_programs,
    has_matrix_units,
    num_segments_of,
    short_tiles,
)
from specdec.kernels.reference.attention import Visible
from specdec.kernels.reference.device_batch import AnyDeviceBatch, DeviceBatch
from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch
from specdec.types.drafts.draft_tree import ancestors, depths, signed_words
from specdec.types.sharding import HeadShard

Int32Array = NDArray[np.int32]

_LONG_TILE = 64


class ValueSize(NamedTuple):
    """Dimensions of the values of a head, and the bytes of a number of its queries."""

    dim: int
    element_size: int


@dataclass(frozen=True)
class TileShape:
    """Shape of the tiles of one launch.

    num_rows: rows of a tile, a power of two; a row is a query of one head. used_rows: those that
    can have a query. num_segments: that the longest context has; None for long queries, whose
    context has no segments.
    """

    num_rows: int
    used_rows: int
    num_segments: int | None

    def num_parts(self, num_programs: int) -> int:
        """Return the segments to compute one by one: none where there are programs enough.

        num_programs: of the launch otherwise, one for each tile and KV head.
        """
        if self.num_segments is None or num_programs >= enough_programs(self.used_rows):
            return 0
        return self.num_segments if self.num_segments > 1 else 0

    @classmethod
    def of(
        cls,
        query_lens: Sequence[int],
        context_len: int,
        heads_per_kv: int,
        values: ValueSize,
        *,
        invariant: bool,
        is_decode: bool = False,
    ) -> TileShape:
        """Return the shape for sequences of one class (`classes_of`).

        context_len: the longest. invariant: as in TritonAttention. is_decode: whether the queries
        are drafts, whose contexts are split however many there are.
        """
        is_split = invariant or is_decode or max(query_lens) <= MAX_SHORT_QUERY_TOKENS
        longest = max(query_lens) * heads_per_kv
        num_rows = tile_rows(longest, values)
        if not is_split and has_matrix_units(values.element_size):
            num_rows = _LONG_TILE
        if invariant:
            num_rows = SHORT_TILES[0]
        num_rows = max(num_rows, 1 << (heads_per_kv - 1).bit_length())
        used_rows = min(longest, num_rows // heads_per_kv * heads_per_kv)
        return cls(num_rows, used_rows, num_segments_of(context_len) if is_split else None)


class _Options(TypedDict):
    dtype: torch.dtype
    device: torch.device


class Parts(NamedTuple):
    """Results of the segments of N tiles, which all layers overwrite."""

    values: Tensor  # [N, num_kv_heads, num_segments, used_rows, head_dim] float32
    statistics: Tensor  # [N, num_kv_heads, num_segments, 2, used_rows] float32: maximum and sum


@dataclass(frozen=True)
class Tiles:
    """The queries of one launch, in N tiles.

    parts: results of segments; None where one program attends to all segments of a context.
    """

    sequences: Tensor  # [N] int32; -1 for a tile without queries
    tokens: Tensor  # [N] int32: first query of the tile within its sequence
    shape: TileShape
    parts: Parts | None

    @classmethod
    def allocate(
        cls, sequences: Tensor, tokens: Tensor, shape: TileShape, num_kv_heads: int, head_dim: int
    ) -> Tiles:
        """Allocate the parts beside the tiles; heads of this rank."""
        num_parts = shape.num_parts(len(sequences) * num_kv_heads)
        if num_parts == 0:
            return cls(sequences, tokens, shape, None)
        leading = (len(sequences), num_kv_heads, num_parts)
        values = torch.empty(
            *leading, shape.used_rows, head_dim, dtype=torch.float32, device=sequences.device
        )
        statistics = torch.empty(
            *leading, 2, shape.used_rows, dtype=torch.float32, device=sequences.device
        )
        return cls(sequences, tokens, shape, Parts(values, statistics))


@dataclass(frozen=True)
class TritonPlan:
    """The part of a batch's attention that is the same for all layers; all on the device."""

    slot_mapping: Tensor  # [T] integers; negative for a token whose KV is not written
    positions: Tensor  # [T] integers
    cu_seqlens: Tensor  # [B + 1] int32
    context_lens: Tensor  # [B] integers
    first_nodes: Tensor  # [B] integers: slot of the first node of a tree; the context without one
    block_tables: Tensor  # [B, M] integers
    ancestors: Tensor | None  # [T] int64, as in draft_tree.ancestors; None without trees
    launches: tuple[Tiles, ...]
    visible: Visible


def plan_batch(
    batch: ForwardBatch,
    heads: HeadShard,
    values: ValueSize,
    device: torch.device,
    visible: Visible,
    *,
    invariant: bool,
) -> TritonPlan:
    """Divide a batch into tiles, and copy what the kernels read to the device, in one copy.

    Arguments as in PagedAttention.plan; invariant: as in TritonAttention.
    """
    launches = [
        _divide(batch, members, heads.heads_per_kv, values, invariant=invariant)
        for members in classes_of(batch, invariant=invariant)
        if members
    ]
    assert not visible.num_ahead, "queries see ahead in a DeviceBatch alone"
    words = _ancestor_words(batch, visible.window)
    arrays = _arrays_of(batch)
    arrays += [part for tiles in launches for part in (tiles.sequences, tiles.tokens)]
    arrays += [] if words is None else [words.view(np.int32)]
    copies = iter(_to_device(arrays, device))
    return TritonPlan(
        slot_mapping=next(copies),
        positions=next(copies),
        cu_seqlens=next(copies),
        context_lens=next(copies),
        first_nodes=next(copies),
        block_tables=next(copies),
        launches=tuple(
            Tiles.allocate(next(copies), next(copies), tiles.shape, len(heads.kv), values.dim)
            for tiles in launches
        ),
        ancestors=None if words is None else next(copies).view(torch.int64),
        visible=visible,
    )


def _arrays_of(batch: ForwardBatch) -> list[Int32Array]:
    """Return what the kernels read of a batch, in the order of TritonPlan's fields."""
    nodes = np.array([chunk.num_nodes for chunk in batch.chunks], np.int32)
    return [
        batch.slot_mapping,
        batch.positions,
        batch.cu_seqlens_q,
        batch.context_lens,
        batch.context_lens - nodes,
        batch.block_tables,
    ]


def plan_device_batch(
    batch: DeviceBatch,
    heads: HeadShard,
    values: ValueSize,
    block_size: int,
    visible: Visible,
    *,
    invariant: bool,
) -> TritonPlan:
    """Divide a batch of fixed shape into tiles; contexts may be as long as the block tables."""
    device, num_seqs = batch.positions.device, batch.num_sequences
    longest = batch.block_tables.shape[1] * block_size
    group = heads.heads_per_kv
    shape = TileShape.of(
        [batch.query_len], longest, group, values, invariant=invariant, is_decode=True
    )
    options: _Options = {"dtype": torch.int32, "device": device}
    starts = torch.arange(0, batch.query_len, shape.num_rows // heads.heads_per_kv, **options)
    sequences = torch.arange(num_seqs, **options).repeat_interleave(len(starts))
    tokens = starts.repeat(num_seqs)
    launches = (Tiles.allocate(sequences, tokens, shape, len(heads.kv), values.dim),)
    bounds = torch.arange(0, num_seqs * batch.query_len + 1, batch.query_len, **options)
    return plan_of_tiles(batch, bounds, launches, visible)


def plan_of_tiles(
    batch: AnyDeviceBatch, cu_seqlens: Tensor, launches: tuple[Tiles, ...], visible: Visible
) -> TritonPlan:
    """Return the plan of a batch on the device that was divided into tiles."""
    context_lens, trees = batch.context_lens.contiguous(), batch.trees
    first_nodes, words = context_lens, None
    if trees is not None:
        first_nodes = trees.first_nodes.contiguous()
        words = trees.within(visible.window, batch.positions, batch.rows).contiguous()
    return TritonPlan(
        slot_mapping=batch.slot_mapping.contiguous(),
        positions=batch.positions.contiguous(),
        cu_seqlens=cu_seqlens,
        context_lens=context_lens,
        first_nodes=first_nodes,
        block_tables=batch.block_tables.contiguous(),
        ancestors=words,
        launches=launches,
        visible=visible,
    )


def classes_of(batch: ForwardBatch, *, invariant: bool) -> tuple[list[int], list[int]]:
    """Return the sequences whose context is split, and those with long chunks."""
    short, long = list[int](), list[int]()
    for index in range(batch.num_sequences):
        is_long = batch.query_len(index) > MAX_SHORT_QUERY_TOKENS and not invariant
        (long if is_long else short).append(index)
    return short, long


@dataclass(frozen=True)
class _HostTiles:
    """Tiles before they are copied to the device."""

    sequences: Int32Array
    tokens: Int32Array
    shape: TileShape


def _divide(
    batch: ForwardBatch,
    members: Sequence[int],
    heads_per_kv: int,
    values: ValueSize,
    *,
    invariant: bool,
) -> _HostTiles:
    """Divide the queries of sequences of one class into tiles."""
    lengths = [batch.query_len(index) for index in members]
    context_len = max(int(batch.context_lens[index]) for index in members)
    shape = TileShape.of(lengths, context_len, heads_per_kv, values, invariant=invariant)
    per_tile = shape.num_rows // heads_per_kv
    starts = [np.arange(0, length, per_tile, dtype=np.int32) for length in lengths]
    sequences = np.repeat(np.array(members, np.int32), [len(each) for each in starts])
    return _HostTiles(sequences, np.concatenate(starts), shape)


def tile_rows(num_rows: int, values: ValueSize) -> int:
    """Return the rows of the smallest tile for `num_rows` rows of short queries, or the largest."""
    sizes = short_tiles(*values)
    return next((size for size in sizes if size >= num_rows), sizes[-1])


def _ancestor_words(batch: ForwardBatch, window: int | None) -> NDArray[np.int64] | None:
    """Return the nodes that each token sees as bits, [T]; None where no sequence has a tree."""
    if not batch.has_trees:
        return None
    words = np.zeros(batch.num_tokens, np.int64)
    for end, chunk in zip(batch.cu_seqlens_q[1:].tolist(), batch.chunks, strict=True):
        if chunk.parents:
            own = _visible_nodes(chunk, window)[-len(chunk.token_ids) :]
            words[end - len(own) : end] = own
    return words


def _visible_nodes(chunk: Chunk, window: int | None) -> list[int]:
    """Return the nodes of a tree that each of them sees, as bits of a signed word."""
    parents = chunk.parents or ()
    masks, depth = ancestors(parents), depths(parents)
    if window is not None:
        masks = [
            mask & sum(1 << node for node in range(len(masks)) if own - depth[node] < window)
            for mask, own in zip(masks, depth, strict=True)
        ]
    return signed_words(masks)


def _to_device(arrays: Sequence[Int32Array], device: torch.device) -> list[Tensor]:
    """Copy arrays to the device in one copy; return a view of each in its shape.

    Each begins at a multiple of 16 bytes.
    """
    sizes = [-(-array.size // 4) * 4 for array in arrays]
    packed = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    host, start = packed.numpy(), 0
    for array, size in zip(arrays, sizes, strict=True):
        host[start : start + array.size] = array.ravel()
        start += size
    parts = packed.to(device, non_blocking=True).split(sizes)
    return [part[: array.size].view(array.shape) for part, array in zip(parts, arrays, strict=True)]
