"""Rows of logits of all ranks, divided over them by row instead of by token.

Each rank computes the logits of its shard of the vocabulary, for all rows. Noise and truncation of
a row need its best token, and sums over its tokens in the order of their scores, which would take
an all-reduce for each bit of a floor. So the ranks exchange their logits once: each receives whole
rows, a share of them, samples these as a single rank would, with the same bits, and the ranks
gather the tokens. A rank sends (size - 1) / size of its logits; gathering them on every rank, as
others do, sends all of them to each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.config.gpu.graph_sizes import MAX_EXCHANGED_LOGITS
from specdec.sampling.vocab_shard import VocabShard
from specdec.types.sharding import partition


def exchanged_rows(
    logits: Tensor, shard: VocabShard, of_rows: Callable[[Tensor, slice], Tensor], *, width: int
) -> Tensor:
    """Return what `of_rows` finds of each row, [num_rows, width] int64, on every rank.

    logits: [num_rows, num_tokens] of this rank. of_rows: function of whole rows, one or more, and
    of their places among all. Rows are exchanged in slabs of MAX_EXCHANGED_LOGITS, or a row for
    each rank, so that their memory is bounded. A collective call: with several ranks an all-to-all
    and an all-gather for each slab.
    """
    if shard.group.size == 1:
        return of_rows(logits, slice(0, len(logits)))
    size = max(shard.group.size, MAX_EXCHANGED_LOGITS // shard.vocab_size)
    found = []
    for start in range(0, len(logits), size):
        slab = logits[start : start + size]
        own, whole = own_rows(len(slab), shard), whole_rows(slab, shard)
        values = torch.zeros(len(whole), width, dtype=torch.int64, device=logits.device)
        if len(whole):
            values[:] = of_rows(whole, slice(start + own.start, start + own.stop))
        found.append(gather_rows(values, len(slab), shard))
    return torch.cat(found) if found else logits.new_zeros(0, width, dtype=torch.int64)


def own_rows(num_rows: int, shard: VocabShard) -> slice:
    """Return the rows that this rank samples; there may be none."""
    count, rank = _rows_of_rank(num_rows, shard), shard.group.rank
    return slice(min(count * rank, num_rows), min(count * (rank + 1), num_rows))


def whole_rows(logits: Tensor, shard: VocabShard) -> Tensor:
    """Exchange logits [num_rows, num_tokens] of this rank; return whole rows, those of `own_rows`.

    A collective call, one all-to-all. Returns [len(own_rows), vocab_size].
    """
    num_rows, num_tokens = logits.shape
    shares = partition(shard.vocab_size, shard.group.size)
    assert shares[shard.group.rank] == range(shard.first_token, shard.first_token + num_tokens)
    count, widest = _rows_of_rank(num_rows, shard), max(map(len, shares))
    missing = (count * shard.group.size - num_rows, widest - num_tokens)
    if any(missing):
        logits = F.pad(logits, (0, missing[1], 0, missing[0]))
    received = shard.group.all_to_all(logits.reshape(shard.group.size, count, widest))
    rows = own_rows(num_rows, shard)
    own = received[:, : rows.stop - rows.start]
    return torch.cat([part[:, : len(share)] for part, share in zip(own, shares, strict=True)], 1)


def gather_rows(values: Tensor, num_rows: int, shard: VocabShard) -> Tensor:
    """Return the values of all rows, [num_rows, ...], on every rank; a collective call.

    values: [len(own_rows), ...] of the rows of this rank.
    """
    missing = _rows_of_rank(num_rows, shard) - len(values)
    if missing:
        values = torch.cat([values, values.new_zeros(missing, *values.shape[1:])])
    return shard.group.all_gather(values).flatten(0, 1)[:num_rows]


def _rows_of_rank(num_rows: int, shard: VocabShard) -> int:
    """Return the most rows that a rank samples."""
    return -(-num_rows // shard.group.size)
