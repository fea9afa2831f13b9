"""The best children of nodes of draft trees, by ranks that each hold a part of the vocabulary.

`device.device_children` defines them. Several ranks exchange their logits, and each ranks the
tokens of a share of the rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.sampling.device.device_children import DeviceChildren
from specdec.sampling.device.device_sampler import DeviceRules
from specdec.sampling.row_exchange import exchanged_rows
from specdec.sampling.sampling_batch import SamplingBatch
from specdec.sampling.vocab_shard import VocabShard


def children_of_ranks(
    logits: Tensor,
    count: int,
    shard: VocabShard,
    children: Callable[[Tensor, slice], DeviceChildren],
) -> DeviceChildren:
    """Return the children of rows that `children` finds of some whole rows; a collective call.

    logits: [num_rows, num_tokens], of this rank.
    """
    logits = logits[:, : shard.vocab_size - shard.first_token]
    if shard.group.size == 1:
        return children(logits, slice(0, len(logits)))

    def children_of_own(whole: Tensor, own: slice) -> Tensor:
        found = children(whole, own)
        return torch.cat([found.token_ids, found.confidences.view(torch.int64)], 1)

    found = exchanged_rows(logits, shard, children_of_own, width=2 * count)
    token_ids, bits = (part.contiguous() for part in found.split(count, 1))
    return DeviceChildren(token_ids, bits.view(torch.float64))


def best_children_of(
    logits: Tensor,
    sampling: DeviceRules | SamplingBatch | None,
    count: int,
    shard: VocabShard,
    *,
    on_host: bool = False,
) -> DeviceChildren:
    """Return the `count` best tokens of each row, the one that is sampled first.

    A row whose logits have NaN, or no finite value, has none. A collective call.
    logits: [num_rows, num_tokens], of this rank. Others as in `RowOps.children`.
    """

    def children(whole: Tensor, own: slice) -> DeviceChildren:
        of_own = None if sampling is None else sampling[own]
        return shard.ops.children(whole, of_own, count, on_host=on_host)

    return children_of_ranks(logits, count, shard, children)
