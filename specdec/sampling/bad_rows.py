"""Rows of logits from which no token can be drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.parallel import TensorParallelGroup


def bad_rows(best: Tensor, best_left: Tensor, group: TensorParallelGroup) -> Tensor:
    """Which rows hold NaN or +inf, or nothing but -inf, [num_rows] bool; the same on every rank.

    best, best_left: [num_rows], the highest of this rank's logits as the model computed them, and
    of what is left of them where tokens were forbidden. NaN counts as the highest, as in
    torch.amax, so one number a row says it all.
    """
    is_broken = ~(best < torch.inf)
    counts = group.all_reduce(torch.stack([is_broken, best_left > -torch.inf]).int())
    return (counts[0] > 0) | (counts[1] == 0)
