"""The best children of nodes of draft trees in tensors of fixed shape, without the host.

They are those of `top_children`, by the same scores: of a row without temperature the head's own
best tokens, of others those that the noise of the target favors most. As in `device_sampler` the
noise of the whole vocabulary is computed, and several ranks exchange their logits, so that each
ranks a share of the rows. The operators of torch here are the reference of the kernels of Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.reference.triton_availability import has_triton
from specdec.sampling.device.device_sampler import (
    SLAB_LOGITS,
    DeviceRules,
    SamplingKind,
    perturbed_scores,
    row_sampling,
    torch_argmax,
)
from specdec.sampling.row_exchange import exchanged_slabs, gather_rows, own_rows, whole_rows
from specdec.sampling.top_children import (
    NUM_WEIGHED,
    confidences_of_logits,
    confidences_of_scores,
)
from specdec.sampling.vocab_shard import VocabShard

_LOW_WORD = 2**32 - 1


class DeviceChildren(NamedTuple):
    """The best children of R nodes, best first; `tree_growth.Children` on the device."""

    token_ids: Tensor  # [R, m] int64
    confidences: Tensor  # [R, m] float64; 0 where there is no such child


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
    logits = logits[:, : shard.vocab_size - shard.first_token]
    if shard.group.size == 1:
        return _whole_children(logits, rules, kind, count)
    slabs = exchanged_slabs(len(logits), shard)
    return _by_slabs(logits, rules, slabs, partial(_exchanged, kind=kind, count=count, shard=shard))


def _by_slabs(
    logits: Tensor,
    rules: DeviceRules | None,
    slabs: Sequence[slice],
    children: Callable[[Tensor, DeviceRules | None], DeviceChildren],
) -> DeviceChildren:
    """Return the children of rows, of one slab of them at once."""
    parts = [children(logits[slab], None if rules is None else rules[slab]) for slab in slabs]
    return DeviceChildren(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _exchanged(
    logits: Tensor, rules: DeviceRules | None, kind: SamplingKind, count: int, shard: VocabShard
) -> DeviceChildren:
    """Return the children of rows of which each rank has a part; an exchange, and a gather."""
    num_rows, rows = len(logits), own_rows(len(logits), shard)
    whole = whole_rows(logits, shard)
    own = torch.zeros(len(whole), 2, count, dtype=torch.int64, device=logits.device)
    if len(whole) > 0:
        found = _whole_children(whole, None if rules is None else rules[rows], kind, count)
        own[:, 0], own[:, 1] = found.token_ids, found.confidences.view(torch.int64)
    token_ids, confidences = gather_rows(own, num_rows, shard).unbind(1)
    return DeviceChildren(token_ids, confidences.contiguous().view(torch.float64))


def _whole_children(
    logits: Tensor, rules: DeviceRules | None, kind: SamplingKind, count: int
) -> DeviceChildren:
    """Return the children of rows of the whole vocabulary on this rank."""
    if has_triton(logits.device):
        from specdec.kernels.triton.children import best_children  # imports Triton

        sampling = None if rules is None else row_sampling(rules)
        truncates = kind is SamplingKind.TRUNCATED
        found = best_children(logits, sampling, count, NUM_WEIGHED, truncates=truncates)
        return DeviceChildren(*found)
    size = max(1, SLAB_LOGITS // logits.shape[1])
    slabs = [slice(start, start + size) for start in range(0, len(logits), size)]
    return _by_slabs(logits, rules, slabs, partial(_torch_children, kind=kind, count=count))


def _torch_children(
    logits: Tensor, rules: DeviceRules | None, kind: SamplingKind, count: int
) -> DeviceChildren:
    """Return the children by torch's operators."""
    best = torch_argmax(logits)
    is_valid = ~(best.has_nan | (best.values == -torch.inf))
    scores = logits.float()
    totals = scores.logsumexp(1, keepdim=True)
    if rules is None:
        values, token_ids = _largest(scores, count)
        confidences = confidences_of_logits(values.double(), totals.double())
    else:
        is_noisy = (rules.temperatures > 0)[:, None]
        scores = torch.where(is_noisy, perturbed_scores(logits, rules, kind), scores)
        values, token_ids = _largest(scores, max(count, NUM_WEIGHED))
        confidences = torch.where(
            is_noisy,
            confidences_of_scores(values.double(), rules.temperatures.double()),
            confidences_of_logits(values.double(), totals.double()),
        )
    confidences = torch.where(is_valid[:, None], confidences[:, :count], 0)
    return DeviceChildren(token_ids[:, :count], confidences)


def _largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest scores of each row, descending, and their tokens; [num_rows, count] each.

    Of equal scores the lower token comes first: both are ordered as one integer, the bits of a
    score and then those of the token. scores: [num_rows, num_tokens] float32. Missing tokens have
    the score -inf.
    """
    bits = (scores + 0.0).view(torch.int32)  # 0 for -0, its equal
    ordered = bits ^ (bits >> 31 & 0x7FFFFFFF)
    tokens = torch.arange(scores.shape[1], device=scores.device)
    keys = (ordered.long() << 32) + (_LOW_WORD - tokens)
    best = keys.topk(min(count, scores.shape[1])).values
    token_ids, ordered = _LOW_WORD - (best & _LOW_WORD), (best >> 32).int()
    values = (ordered ^ (ordered >> 31 & 0x7FFFFFFF)).view(torch.float32)
    missing = (0, count - values.shape[1])
    return F.pad(values, missing, value=-torch.inf), F.pad(token_ids, missing)
