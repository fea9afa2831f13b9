"""One rank's shard of the vocabulary, and the argmax over all shards."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from specdec.kernels.cpu import SharedMemory
from specdec.kernels.reference.sample_rows import RowArgmax
from specdec.kernels.sample import shared_memory_argmax
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.sampling.row_ops import RowOps


@dataclass(frozen=True)
class VocabShard:
    """The vocabulary shard of one rank: it holds the logits of the tokens from `first_token` on.

    Columns of logits beyond vocab_size are padding. A higher rank has higher token ids. ops: what
    samples whole rows.
    """

    group: TensorParallelGroup
    first_token: int
    vocab_size: int
    ops: RowOps = field(default_factory=RowOps)


def all_ranks_argmax(argmax: RowArgmax, shard: VocabShard) -> RowArgmax:
    """Return the argmax over the whole vocabulary, equal on every rank; a collective call.

    argmax: of this rank's logits. A row has NaN if it has NaN on any rank.
    """
    group = shard.group
    if group.size == 1:
        return argmax
    if isinstance(group.collectives, SharedMemory):
        return shared_memory_argmax(argmax, group.collectives, shard.first_token)
    columns = (argmax.values, shard.first_token + argmax.token_ids, argmax.has_nan)
    own = torch.stack([column.double() for column in columns], dim=1)  # float64 holds each exactly
    values, token_ids, has_nan = group.all_gather(own).unbind(2)  # [size, num_rows] each
    # Of ranks with equal values, argmax takes the first, which has the lowest token ids.
    best = values.argmax(0, keepdim=True)
    return RowArgmax(
        values.gather(0, best).squeeze(0).float(),
        token_ids.gather(0, best).squeeze(0).long(),
        has_nan.amax(0) > 0,
    )
