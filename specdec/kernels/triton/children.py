"""Best children of nodes of draft trees on a GPU; `sampling.device.device_children` defines it."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from specdec.config.gpu.truncation_search import TILE_TOKENS
from specdec.kernels.reference.sample_rows import RowSampling
from specdec.kernels.triton.device import children as kernels
from specdec.kernels.triton.sample import TileArgmax
from specdec.kernels.triton.truncation import truncation_floors


def best_children(
    logits: Tensor, sampling: RowSampling | None, count: int, num_weighed: int, *, truncates: bool
) -> tuple[Tensor, Tensor]:
    """Return the `count` best tokens of R rows and their confidences, [R, count] each.

    logits: [R, vocab_size], the whole vocabulary. sampling: None where no row has a temperature;
    with one, confidences are `confidences_of_scores`, and the best `num_weighed` sum to 1.
    truncates: whether a row may have min_p, top_k or top_p.
    """
    num_rows, vocab_size = logits.shape
    tiles = TileArgmax(logits)
    best = tiles.reduce()
    num_kept = count if sampling is None else max(count, num_weighed)
    columns = _columns(tiles, best.values, sampling, truncates=truncates)
    shape, device = (num_rows, tiles.num_tiles), logits.device
    keys = torch.empty(*shape, num_kept, dtype=torch.int64, device=device)
    sums = torch.empty(shape, dtype=torch.float32, device=device)
    kernels.tile_children[shape](
        logits,
        keys,
        sums,
        *columns,
        logits.stride(0),
        vocab_size,
        tiles.num_tiles,
        NOISY=sampling is not None,
        COUNT=num_kept,
        BLOCK=TILE_TOKENS,
        num_warps=8,
        enable_fp_fusion=False,
    )
    rows = (tiles.best, best.values, best.has_nan.int(), columns[1])
    return _merge_tiles(keys, sums, rows, count, num_weighed, is_noisy=sampling is not None)


def _merge_tiles(
    keys: Tensor,
    sums: Tensor,
    rows: tuple[Tensor, ...],
    count: int,
    num_weighed: int,
    *,
    is_noisy: bool,
) -> tuple[Tensor, Tensor]:
    """Return the best tokens of rows, from those of their tiles, and their confidences.

    keys: [R, tiles, kept]. sums: [R, tiles]. rows: what the kernel reads of the rows.
    """
    num_rows, num_tiles, num_kept = keys.shape
    token_ids = torch.empty(num_rows, count, dtype=torch.int64, device=keys.device)
    confidences = torch.empty(num_rows, count, dtype=torch.float64, device=keys.device)
    kernels.merge_children[(num_rows,)](
        keys,
        sums,
        *rows,
        token_ids,
        confidences,
        num_tiles,
        count,
        NOISY=is_noisy,
        COUNT=num_kept,
        NUM_WEIGHED=num_weighed,
        BLOCK_COUNT=triton.next_power_of_2(num_kept),
        BLOCK_TILES=triton.next_power_of_2(num_tiles),
        num_warps=1,
    )
    return token_ids, confidences


def _columns(
    tiles: TileArgmax, best: Tensor, sampling: RowSampling | None, *, truncates: bool
) -> tuple[Tensor, ...]:
    """Return the best scores of R rows, then what their noise depends on, [R] each.

    These are temperatures, floors, seeds, choices and positions; without noise no kernel reads
    them.
    """
    if sampling is None:
        return (best,) * 6
    floors = sampling.min_scores
    if truncates:
        floors = truncation_floors(tiles.logits, tiles.best, best, sampling.limits)
    keys = (sampling.seeds, sampling.choices, sampling.positions)
    return (best, sampling.temperatures, floors, *keys)
