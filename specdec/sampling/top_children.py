"""The best children of nodes of draft trees, by ranks that each hold a part of the vocabulary.

`device.device_children` defines them. Several ranks exchange their logits, and each ranks the
tokens of a share of the rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.sampling.device.device_children import DeviceChildren
from specdec.sampling.device.device_sampler import DeviceRules, SamplingKind
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


def children_on_device(
    logits: Tensor,  # [num_rows, num_tokens]
    rules: DeviceRules | None,
    kind: SamplingKind,
    count: int,
    shard: VocabShard,
) -> DeviceChildren:
    """Return the `count` best tokens of each row, the one of `sample_on_device` first.

    A row whose logits have NaN, or no finite value, has none. A collective call. logits, rules,
    kind: as in `sample_on_device`.
    """

    def children(whole: Tensor, own: slice) -> DeviceChildren:
        return shard.ops.children(whole, None if rules is None else rules[own], kind, count)

    return children_of_ranks(logits, count, shard, children)


def best_children_of(
    logits: Tensor, batch: SamplingBatch | None, count: int, shard: VocabShard
) -> DeviceChildren:
    """Return the children as `children_on_device` does, of rows that the host knows.

    batch: of these rows; None for the tokens with the largest logits. A collective call.
    """

    def children(whole: Tensor, own: slice) -> DeviceChildren:
        of_own = None if batch is None else batch.take(own)
        return shard.ops.children_of(whole, of_own, count)

    return children_of_ranks(logits, count, shard, children)
