"""Rows of logits from which no token can be drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.parallel import TensorParallelGroup


def bad_rows(is_broken: Tensor, best_left: Tensor, group: TensorParallelGroup) -> Tensor:
    """Which rows hold NaN or +inf, or nothing but -inf, [num_rows] bool; the same on every rank.

    is_broken: [num_rows] bool, whether this rank's logits hold NaN or +inf, as the model computed
    them. best_left: [num_rows], the highest of what is left of them where tokens were forbidden.
    """
    is_something = best_left > -torch.inf
    if group.size == 1:
        return is_broken | ~is_something
    counts = group.all_reduce(torch.stack([is_broken, is_something]).int())
    return (counts[0] > 0) | (counts[1] == 0)
