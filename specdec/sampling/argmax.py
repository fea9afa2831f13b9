"""Argmax of rows of logits whose columns are split across ranks."""

from __future__ import annotations

import torch

from specdec.distributed.group import TensorParallelGroup
from specdec.kernels.cpu import SharedMemory
from specdec.kernels.sample import RowArgmax, shared_memory_argmax


def all_ranks_argmax(argmax: RowArgmax, group: TensorParallelGroup, first_token: int) -> RowArgmax:
    """Return the argmax over the whole vocabulary, equal on every rank; a collective call.

    argmax: of this rank's logits, whose first column is `first_token`. A row has NaN if it has NaN
    on any rank.
    """
    if group.size == 1:
        return argmax
    if isinstance(group.collectives, SharedMemory):
        return shared_memory_argmax(argmax, group.collectives, first_token)
    columns = (argmax.values, first_token + argmax.token_ids, argmax.has_nan)
    own = torch.stack([column.double() for column in columns], dim=1)  # float64 holds each exactly
    values, token_ids, has_nan = group.all_gather(own).unbind(2)  # [size, num_rows] each
    # Of ranks with equal values, argmax takes the first, which has the lowest token ids.
    best = values.argmax(0, keepdim=True)
    return RowArgmax(
        values.gather(0, best).squeeze(0).float(),
        token_ids.gather(0, best).squeeze(0).long(),
        has_nan.any(0),
    )
