"""Plans of paged attention for ragged batches on the device, whose lengths the host does not read.

The launches have as many tiles as any division of the tokens among the sequences may need; a tile
that this one does not need has no queries, and its programs return at once.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specdec.config.gpu.attention_splits import MAX_SHORT_QUERY_TOKENS
from specdec.kernels.reference.attention import Visible
from specdec.kernels.reference.device_batch import RaggedBatch
from specdec.kernels.triton.attention_plan import (
    Tiles,
    TileShape,
    TritonPlan,
    ValueSize,
    plan_of_tiles,
)
from specdec.types.sharding import HeadShard


def plan_ragged_batch(
    batch: RaggedBatch,
    heads: HeadShard,
    values: ValueSize,
    block_size: int,
    visible: Visible,
    *,
    invariant: bool,
) -> TritonPlan:
    """Divide a ragged batch into tiles of short queries and of long ones.

    Contexts may be as long as the block tables. Arguments as in PagedAttention.plan and
    TritonAttention.
    """
    assert not visible.num_ahead, "queries see ahead in a DeviceBatch alone"
    launches = _launches(batch, heads, values, block_size, invariant=invariant)
    return plan_of_tiles(batch, batch.cu_seqlens.contiguous(), launches, visible)


def _launches(
    batch: RaggedBatch, heads: HeadShard, values: ValueSize, block_size: int, *, invariant: bool
) -> tuple[Tiles, ...]:
    """Return the tiles of the short queries, and those of the long ones if there may be any."""
    num_tokens, num_seqs = len(batch.input_ids), len(batch.context_lens)
    longest = batch.block_tables.shape[1] * block_size
    lens = batch.cu_seqlens.diff()
    is_long = (lens > MAX_SHORT_QUERY_TOKENS) & (not invariant)
    short = min(batch.decode_len, MAX_SHORT_QUERY_TOKENS)
    group = heads.heads_per_kv
    shape = TileShape.of([short], longest, group, values, invariant=invariant)
    # A sequence may have more tokens than one that decodes, and then fills its tiles.
    whole_rows = shape.num_rows // heads.heads_per_kv * heads.heads_per_kv
    launches = [
        _tiles(
            lens.masked_fill(is_long, 0),
            replace(shape, used_rows=whole_rows),
            num_tokens if invariant else min(num_tokens, num_seqs * MAX_SHORT_QUERY_TOKENS),
            heads,
            values.dim,
        )
    ]
    if num_tokens > MAX_SHORT_QUERY_TOKENS and not invariant:
        shape = TileShape.of([num_tokens], longest, group, values, invariant=False)
        num_long = min(num_seqs, num_tokens // (1 + MAX_SHORT_QUERY_TOKENS))
        own = lens.masked_fill(~is_long, 0)
        launches.append(_tiles(own, shape, num_tokens, heads, values.dim, num_long))
    return tuple(launches)


def _tiles(
    lens: Tensor,  # [B] integers, 0 for sequences of the other launch
    shape: TileShape,
    num_tokens: int,
    heads: HeadShard,
    head_dim: int,
    num_seqs: int | None = None,
) -> Tiles:
    """Return the tiles of the sequences of a launch, in order.

    num_tokens: most of all of them. num_seqs: most that have a token; None for all.
    """
    per_tile = shape.num_rows // heads.heads_per_kv
    num_seqs = len(lens) if num_seqs is None else num_seqs
    num_tiles = min(num_tokens, num_seqs + num_tokens // per_tile)
    counts = (lens + per_tile - 1) // per_tile
    ends = counts.cumsum(0)
    tiles = torch.arange(num_tiles, device=lens.device)
    owners = torch.searchsorted(ends, tiles, right=True).clamp_max_(len(lens) - 1)
    tokens = (tiles - ends[owners] + counts[owners]) * per_tile
    sequences = owners.masked_fill(tiles >= ends[-1], -1)
    return Tiles.allocate(
        sequences.to(torch.int32), tokens.to(torch.int32), shape, len(heads.kv), head_dim
    )
