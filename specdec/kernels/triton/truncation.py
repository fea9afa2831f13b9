"""Floors of min_p, top_k and top_p of rows of logits on a GPU; `sampling.truncation` defines them.

Launches depend on shapes alone. Three rounds narrow the brackets of all floors, a fourth launch
gathers the tokens that are left (`device.truncation_rounds`), and a fifth finds the floors among
them (`device.truncation`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from specdec.config.gpu.truncation_search import MAX_CANDIDATES, NUM_THRESHOLDS, TILE_TOKENS
from specdec.kernels.triton.device import truncation as kernels
from specdec.kernels.triton.device import truncation_rounds as rounds

_ROUNDS = 3
_PROGRAMS = 512
"""Programs of a launch, about as many as an H100 runs at once; a row has at most one for a tile."""
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}


def truncation_floors(
    logits: Tensor, tile_best: Tensor, row_best: Tensor, limits: Sequence[Tensor]
) -> Tensor:
    """Return the lowest score that passes min_p, top_k and then top_p, [R] float32.

    Scores are log(probability / probability of the best token). Rows that are not sampled, and rows
    without limits, have -inf.

    logits: [R, vocab_size]. tile_best, row_best: the best logit of each TILE_TOKENS and of each
    row, [R, num_tiles] and [R] float32. limits: `RowSampling.limits`.
    """
    search = _FloorSearch(logits, tile_best, row_best, limits)
    for turn in range(_ROUNDS):
        search.narrow(turn)
    search.gather(_ROUNDS - 1)
    return search.floors()


class _FloorSearch:
    """The search of the floors of R rows: the state between its launches."""

    def __init__(
        self, logits: Tensor, tile_best: Tensor, row_best: Tensor, limits: Sequence[Tensor]
    ) -> None:
        num_rows, num_tiles = tile_best.shape

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=logits.device)

        self._num_rows = num_rows
        self._grid = (num_rows, min(num_tiles, max(1, _PROGRAMS // max(1, num_rows))))
        self._sizes = (logits.stride(0), logits.shape[1], num_tiles)
        self._blocks: dict[str, Any] = {
            "BLOCK": TILE_TOKENS,
            "BLOCK_TILES": triton.next_power_of_2(num_tiles),
            **_OPTIONS,
        }
        self._rows = (logits, tile_best, row_best)
        self._limits = limits
        # Of even and odd rounds.
        self._above_keys = empty(2, num_rows, dtype=torch.int32)
        self._last_keys = empty(2, num_rows, dtype=torch.int32)
        self._weights_above = empty(2, num_rows, dtype=torch.float64)
        self._partials = empty(2, num_rows, num_tiles, NUM_THRESHOLDS, dtype=torch.float32)
        self._targets = empty(num_rows, dtype=torch.float64)
        self._candidates = empty(num_rows, MAX_CANDIDATES, dtype=torch.int32)
        self._num_candidates = empty(num_rows, dtype=torch.int32)
        self._weights_before = empty(num_rows, dtype=torch.float64)

    def narrow(self, turn: int) -> None:
        """Weigh the tokens up to the thresholds of a round."""
        rounds.narrow_floors[self._grid](
            *self._rows,
            *self._limits,
            self._above_keys,
            self._last_keys,
            self._weights_above,
            self._targets,
            self._partials,
            self._num_candidates,
            *self._sizes,
            ROUND=turn,
            **self._blocks,
        )

    def gather(self, turn: int) -> None:
        """Gather the tokens that the round `turn` has left."""
        rounds.gather_candidates[self._grid](
            *self._rows,
            *self._limits[:-1],
            self._above_keys,
            self._last_keys,
            self._weights_above,
            self._targets,
            self._partials,
            self._candidates,
            self._num_candidates,
            self._weights_before,
            *self._sizes,
            ROUND=turn,
            **self._blocks,
        )

    def floors(self) -> Tensor:
        """Return the floors, [R] float32."""
        floors = torch.empty_like(self._weights_before, dtype=torch.float32)
        kernels.truncation_floors[(self._num_rows,)](
            *self._rows,
            *self._limits,
            self._targets,
            self._candidates,
            self._num_candidates,
            self._weights_before,
            floors,
            *self._sizes,
            **self._blocks,
        )
        return floors
