"""The best children of nodes of draft trees on a GPU; `sampling.device_children` defines them."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from specdec.kernels.triton.device import children as kernels
from specdec.kernels.triton.sample import RowSampling, TileArgmax, truncation_floors

_BLOCK = 2048


def best_children(
    logits: Tensor, sampling: RowSampling | None, count: int, num_weighed: int, *, truncates: bool
) -> tuple[Tensor, Tensor]:
    """Return the `count` best tokens of R rows and their confidences, [R, count] each.

    logits: [R, vocab_size], the whole vocabulary. sampling: None where no row has a temperature;
    with one, confidences are `confidences_of_scores` of `num_weighed` tokens or more. truncates:
    whether a row may have min_p, top_k or top_p.
    """
    num_rows, vocab_size = logits.shape
    tiles = TileArgmax(logits)
    best = tiles.reduce()
    is_noisy, num_kept = sampling is not None, count
    columns = (best.values,) * 6
    if sampling is not None:
        num_kept = max(count, num_weighed)
        floors = truncation_floors(tiles, best.values, sampling) if truncates else None
        columns = (
            *(
                best.values,
                sampling.temperatures,
                sampling.min_scores if floors is None else floors,
            ),
            *(sampling.seeds, sampling.choices, sampling.positions),
        )
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
        NOISY=is_noisy,
        COUNT=num_kept,
        BLOCK=_BLOCK,
        num_warps=8,
        enable_fp_fusion=False,
    )
    token_ids = torch.empty(num_rows, count, dtype=torch.int64, device=device)
    confidences = torch.empty(num_rows, count, dtype=torch.float64, device=device)
    kernels.merge_children[(num_rows,)](
        keys,
        sums,
        tiles.best,
        best.values,
        best.has_nan.int(),
        columns[1],
        token_ids,
        confidences,
        tiles.num_tiles,
        count,
        NOISY=is_noisy,
        COUNT=num_kept,
        BLOCK_COUNT=triton.next_power_of_2(num_kept),
        BLOCK_TILES=triton.next_power_of_2(tiles.num_tiles),
        num_warps=1,
    )
    return token_ids, confidences
