"""Min-p, top-k and top-p in tensors of fixed shape, for steps that a device runs without the host.

The floors are those of `truncation`, which selects rows, chunks and tokens on the host. Here every
row is searched, and each floor is found by bisection over the bits of the score: float32 numbers
of one sign order like their bits, so 31 comparisons with all scores of a row find the floor. The
rows are whole: several ranks have exchanged them (`row_exchange`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_KEY_OF_MINUS_INFINITY = 0x7F800000
_NUM_BITS = 31
# As in `truncation`: reached before the total itself, for any rounding of the sums.
_ALMOST_ALL = 1 - 2.0**-46


@dataclass(frozen=True)
class DeviceLimits:
    """Truncation of each row of logits; rows without a limit have its neutral value."""

    top_k: Tensor  # [num_rows] int64; 0: off
    top_p: Tensor  # [num_rows] float64; 1: off
    min_scores: Tensor  # [num_rows] float32, log(min_p); -inf: off

    def __getitem__(self, rows: slice) -> DeviceLimits:
        return DeviceLimits(self.top_k[rows], self.top_p[rows], self.min_scores[rows])


def device_floors(scores: Tensor, limits: DeviceLimits) -> Tensor:
    """Return the lowest score of each row that passes min_p, top_k and then top_p.

    scores: [num_rows, vocab_size] float32, logarithms of probabilities relative to the row's best
    token. Returns [num_rows] float32, -inf for a row that is not truncated.
    """
    keys = scores.abs().view(torch.int32)
    counts = torch.ones_like(scores, dtype=torch.float64)
    by_count = _floors(keys, counts, limits.top_k.double())
    by_count.masked_fill_(limits.top_k == 0, -torch.inf)
    floors = torch.maximum(limits.min_scores, by_count)
    masses = scores.double().exp_() * (scores >= floors.unsqueeze(1))
    by_mass = _floors(keys, masses, masses.sum(1) * limits.top_p)
    return torch.where(limits.top_p < 1, torch.maximum(floors, by_mass), floors)


def _floors(keys: Tensor, weights: Tensor, targets: Tensor) -> Tensor:
    """Return the highest score of each row down to which the tokens weigh its target.

    If all tokens together weigh less, the lowest score of a token with a weight.

    keys: [num_rows, vocab_size] int32, bits of the negated scores. weights: like keys, float64.
    targets: [num_rows] float64. Returns [num_rows] float32.
    """
    targets = torch.minimum(targets, weights.sum(1) * _ALMOST_ALL)
    low = torch.zeros_like(targets, dtype=torch.int32)
    high = torch.full_like(low, _KEY_OF_MINUS_INFINITY)
    for _ in range(_NUM_BITS):
        middle = low + ((high - low) >> 1)
        reached = (weights * (keys <= middle.unsqueeze(1))).sum(1) >= targets
        high = torch.where(reached, middle, high)
        low = torch.where(reached, low, middle + 1)
    return -high.view(torch.float32)
