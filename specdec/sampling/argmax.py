"""The best token of each row of logits over all ranks."""

from __future__ import annotations

import torch

from specdec.distributed.group import TensorParallelGroup
from specdec.kernels.cpu import SharedMemory
from specdec.kernels.sample import RowArgmax, shared_memory_argmax


def all_ranks_argmax(argmax: RowArgmax, group: TensorParallelGroup, first_token: int) -> RowArgmax:
    """Of the whole vocabulary, the same on every rank; a collective call.

    argmax: of this rank's logits, of the tokens from first_token on. A row is broken
    where a part of it is.
    """
    if group.size == 1:
        return argmax
    if isinstance(group.collectives, SharedMemory):
        return shared_memory_argmax(argmax, group.collectives, first_token)
    columns = (argmax.values, first_token + argmax.token_ids, argmax.has_nan)
    own = torch.stack([column.double() for column in columns], dim=1)  # which holds each exactly
    values, token_ids, has_nan = group.all_gather(own).unbind(2)  # [size, num_rows] each
    # The first of equal ranks holds the lowest token ids.
    best = values.argmax(0, keepdim=True)
    return RowArgmax(
        values.gather(0, best).squeeze(0).float(),
        token_ids.gather(0, best).squeeze(0).long(),
        has_nan.any(0),
    )
