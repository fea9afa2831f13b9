"""Attention of drafts in a few calls over padded samples, for a GPU.

On a CPU each sample attends by itself, without padding. On a GPU a batch of a hundred samples would
then be thousands of small launches. Here samples of similar lengths form rows of one call; where
the rows end, a mask hides what belongs to other samples.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from specdec.training.data.batches import Batch, to_device

_LEAST_TOKENS = 64
_CLASSES_PER_DOUBLING = 2
"""Classes of lengths: rows of a class are padded by at most two fifths."""
_ALIGNMENT = 8
"""Sizes of a mask are multiples of it, as the kernels require of 16-bit types."""
_MAX_MASK_ELEMENTS = 2**27
_MASKED_KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_CAUSAL_KERNELS = [SDPBackend.FLASH_ATTENTION, *_MASKED_KERNELS]


def is_padded(batch: Batch) -> bool:
    """Return whether the samples of a batch attend in padded rows."""
    return batch.device.type != "cpu"


class KeyValue(NamedTuple):
    """Keys and values of the same shape, [..., num_kv_heads, head_dim]."""

    key: Tensor
    value: Tensor


class _Row(NamedTuple):
    """Consecutive bases of a sample, and its tokens up to the last of them."""

    first_token: int
    num_tokens: int
    first_base: int
    num_bases: int


@dataclass(frozen=True)
class RowGroup:
    """n rows of up to b bases and t tokens, which attend in one call.

    A row that is shorter is continued by bases and tokens of other samples. The bases follow it in
    the batch, so its own tokens are visible to them, and no row of a mask is empty; their results
    are not used.
    """

    tokens: Tensor  # [n, t] int64: places among the T tokens
    bases: Tensor  # [n, b] int64: places among the R bases
    is_before: Tensor  # [n, b, t] bool: whether a token is before the base
    is_own: Tensor  # [n, b, t] bool: whether it is the base
    is_first: Tensor  # [n, 1, t] bool: whether it is the first of the sample

    @property
    def num_bases(self) -> int:
        """b."""
        return self.bases.shape[1]


@dataclass(frozen=True)
class PaddedBases:
    """All bases of a batch in groups of rows. order: [R], where the groups' results have them."""

    groups: Sequence[RowGroup]
    order: Tensor

    @classmethod
    def of(cls, batch: Batch, max_bases: int, num_own: int, num_queries: int = 1) -> PaddedBases:
        """Lay out rows of up to `max_bases` bases.

        num_own, num_queries: keys and queries of each base itself, which bound the rows of a group.
        """
        order, groups, num_results = np.empty(batch.num_bases, np.int64), [], 0
        for rows in _grouped(list(_rows(batch, max_bases))):
            num_tokens = _aligned(max(each.num_tokens for each in rows))
            num_bases = _aligned(max(each.num_bases for each in rows))
            per_row = num_bases * num_queries * (num_tokens + num_bases * num_own)
            for part in _split(rows, max(1, _MAX_MASK_ELEMENTS // per_row)):
                for each in part:
                    own = slice(each.first_base, each.first_base + each.num_bases)
                    order[own] = num_results + np.arange(each.num_bases)
                    num_results += num_bases
                groups.append(_group(batch, part, num_tokens, num_bases))
        return cls(groups, to_device(torch.from_numpy(order), batch.device))

    def attend(
        self, query: Tensor, context: KeyValue, own: KeyValue, visible: Sequence[Tensor]
    ) -> Tensor:
        """Return the attention of s queries of each base, [R, s, num_heads * head_dim].

        query: [R, s, num_heads, head_dim]. context: of the T tokens, [T, ...]. own: m keys of each
        base that its queries alone attend to, [R, m, ...]. visible: for each group, the tokens
        that the bases attend to, [n, b, t] bool.
        """
        if not self.groups:  # no sample has a base
            return query.flatten(2)
        attended = [
            self._attend(query, context, own, *each)
            for each in zip(self.groups, visible, strict=True)
        ]
        return torch.cat(attended).index_select(0, self.order)

    def _attend(
        self, query: Tensor, context: KeyValue, own: KeyValue, group: RowGroup, visible: Tensor
    ) -> Tensor:
        """Return the attention of a group, [n * b, s, num_heads * head_dim]."""
        num_rows, num_bases = group.bases.shape
        _, num_queries, num_heads, head_dim = query.shape
        num_own = own.key.shape[1]
        key, value = (
            torch.cat([_taken(far, group.tokens), _taken(near, group.bases).flatten(1, 2)], dim=1)
            for far, near in zip(context, own, strict=True)
        )
        is_same = torch.eye(num_bases, dtype=torch.bool, device=query.device)
        is_same = is_same.repeat_interleave(num_own, 1).expand(num_rows, -1, -1)
        mask = torch.cat([visible, is_same], dim=-1).repeat_interleave(num_queries, 1)
        queries = _taken(query, group.bases).flatten(1, 2)
        with sdpa_kernel(_MASKED_KERNELS):
            attended = F.scaled_dot_product_attention(
                queries.transpose(1, 2).to(value.dtype),  # norms return float32
                _repeated(key.to(value.dtype), num_heads),
                _repeated(value, num_heads),
                attn_mask=mask[:, None],
            )
        return attended.transpose(1, 2).reshape(-1, num_queries, num_heads * head_dim)


@dataclass(frozen=True)
class PaddedTokens:
    """All T tokens of a batch in groups of rows, a row for each sample.

    groups: [n, t] int64, places among the T tokens. order: [T], where the groups' results have
    them.
    """

    groups: Sequence[Tensor]
    order: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> PaddedTokens:
        """Lay out a row for each sample, on a device. lengths: the tokens of each."""
        total = sum(lengths)
        order, groups, num_results = np.empty(total, np.int64), [], 0
        ends = accumulate(lengths)
        rows = [_Row(end - each, each, 0, 0) for end, each in zip(ends, lengths, strict=True)]
        for part in _grouped(rows):
            num_tokens = _aligned(max(each.num_tokens for each in part))
            for each in part:
                own = slice(each.first_token, each.first_token + each.num_tokens)
                order[own] = num_results + np.arange(each.num_tokens)
                num_results += num_tokens
            starts = np.array([each.first_token for each in part])
            places = (starts[:, None] + np.arange(num_tokens)).clip(max=total - 1)
            groups.append(to_device(torch.from_numpy(places), device))
        return cls(groups, to_device(torch.from_numpy(order), device))

    def attend(self, query: Tensor, context: KeyValue, scale: float | None = None) -> Tensor:
        """Return causal attention within each sample, [T, num_heads, head_dim] as `query`.

        context: of the T tokens. The tokens that continue a short row are after its own. scale:
        of scores; None for 1 / sqrt(head_dim).
        """
        attended = []
        with sdpa_kernel(_CAUSAL_KERNELS):
            for tokens in self.groups:
                key, value = (_repeated(_taken(x, tokens), query.shape[1]) for x in context)
                queries = _taken(query, tokens).transpose(1, 2)
                found = F.scaled_dot_product_attention(
                    queries, key, value, is_causal=True, scale=scale
                )
                attended.append(found.transpose(1, 2).flatten(0, 1))
        return torch.cat(attended).index_select(0, self.order)


def _rows(batch: Batch, max_bases: int) -> Iterator[_Row]:
    bases = batch.host.bases.numpy()
    for span in batch.spans:
        for start in range(span.bases.start, span.bases.stop, max_bases):
            stop = min(start + max_bases, span.bases.stop)
            num_tokens = int(bases[stop - 1]) + 1 - span.tokens.start
            yield _Row(span.tokens.start, num_tokens, start, stop - start)


def _grouped(rows: Sequence[_Row]) -> list[list[_Row]]:
    """Return the rows by class of their number of tokens."""
    classes = defaultdict[int, list[_Row]](list)
    for each in rows:
        doublings = math.log2(max(each.num_tokens, _LEAST_TOKENS))
        classes[math.ceil(_CLASSES_PER_DOUBLING * doublings)].append(each)
    return [classes[each] for each in sorted(classes)]


def _split(rows: Sequence[_Row], size: int) -> Iterator[list[_Row]]:
    remaining = iter(rows)
    while part := list(islice(remaining, size)):
        yield part


def _group(batch: Batch, rows: Sequence[_Row], num_tokens: int, num_bases: int) -> RowGroup:
    starts = np.array(
        list(chain.from_iterable((each.first_token, each.first_base) for each in rows))
    )
    first_tokens, first_bases = to_device(torch.from_numpy(starts), batch.device).view(-1, 2).T
    steps = torch.arange(max(num_tokens, num_bases), device=batch.device)
    places = first_tokens[:, None] + steps[:num_tokens]
    bases = (first_bases[:, None] + steps[:num_bases]).clamp(max=batch.num_bases - 1)
    own = batch.bases[bases][:, :, None]
    return RowGroup(
        tokens=places.clamp(max=batch.num_tokens - 1),
        bases=bases,
        is_before=places[:, None] < own,
        is_own=places[:, None] == own,
        is_first=(steps[:num_tokens] == 0).expand(len(rows), 1, -1),
    )


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _taken(x: Tensor, places: Tensor) -> Tensor:
    """Return x [N, ...] at places [n, k], [n, k, ...]."""
    return x.index_select(0, places.flatten()).view(*places.shape, *x.shape[1:])


def _repeated(x: Tensor, num_heads: int) -> Tensor:
    """Return keys or values for each query head, [n, num_heads, k, head_dim].

    x: [n, k, num_kv_heads, head_dim]; query heads of a KV head are neighbours.
    """
    return x.repeat_interleave(num_heads // x.shape[2], dim=2).transpose(1, 2)
