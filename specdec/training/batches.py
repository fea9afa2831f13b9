"""Batches of samples, and the order in which a training run sees them.

The order is a function of the samples' lengths and the seed, so a step number is all that has to be
stored to continue it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from specdec.training.corpus import Sample


@dataclass(frozen=True)
class Span:
    """The place of one sample in a batch.

    tokens: of the T tokens that the target runs, all but the sample's last one.
    bases: of the R base tokens.
    """

    tokens: slice
    bases: slice

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.stop - self.tokens.start)

    @property
    def num_bases(self) -> int:
        return int(self.bases.stop - self.bases.start)


@dataclass(frozen=True)
class Batch:
    """Samples one after the other, without padding.

    A *base* is a token of an answer with a token behind it: drafts follow it, as in serving, where
    the target verified it. Draft token i of the base at position b stands for position b + 1 + i.
    At first all such tokens are bases.

    token_ids, next_ids, positions: of the T tokens that the target runs, and of those behind them.
    bases: their places among the T tokens.
    temperatures: of the sample of each base.
    """

    spans: tuple[Span, ...]
    token_ids: Tensor  # [T] int64
    next_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    bases: Tensor  # [R] int64
    temperatures: Tensor  # [R] float32

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Batch:
        """Lay out samples, each with two tokens or more."""
        spans = list[Span]()
        num_tokens = num_bases = 0
        for each in samples:
            length = len(each.token_ids) - 1
            count = length - each.num_prompt_tokens
            tokens = slice(num_tokens, num_tokens + length)
            spans.append(Span(tokens, slice(num_bases, num_bases + count)))
            num_tokens, num_bases = tokens.stop, num_bases + count
        counts = torch.tensor([span.num_bases for span in spans])
        return cls(
            tuple(spans),
            _flat([each.token_ids[:-1] for each in samples]),
            _flat([each.token_ids[1:] for each in samples]),
            _flat([range(span.num_tokens) for span in spans]),
            _flat([range(span.tokens.stop - span.num_bases, span.tokens.stop) for span in spans]),
            torch.tensor([each.temperature for each in samples]).repeat_interleave(counts),
        )

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def num_bases(self) -> int:
        """R."""
        return len(self.bases)

    def behind(self, offset: int) -> Tensor:
        """Return the places of the tokens `offset` behind the bases, [R] int64.

        Where a sample ends earlier it is some other token.
        """
        return (self.bases + offset).clamp(max=self.num_tokens - 1)

    def places(self, depth: int) -> Tensor:
        """Return `behind` for each draft token: of the one before it, [depth, R] int64."""
        return torch.stack([self.behind(index) for index in range(depth)])

    def exists(self, depth: int) -> Tensor:
        """Return whether a sample has a token for each draft token, [depth, R] bool."""
        ends = torch.cat([torch.full((span.num_bases,), span.tokens.stop) for span in self.spans])
        return torch.arange(depth)[:, None] < ends - self.bases

    def with_bases(self, limit: int, generator: np.random.Generator) -> Batch:
        """Return the batch with at most `limit` bases of each sample, drawn at random."""
        if all(span.num_bases <= limit for span in self.spans):
            return self
        spans, kept, num_bases = list[Span](), [], 0
        for span in self.spans:
            count = min(limit, span.num_bases)
            drawn = generator.choice(span.num_bases, count, replace=False)
            kept.append(np.sort(drawn) + span.bases.start)
            spans.append(replace(span, bases=slice(num_bases, num_bases + count)))
            num_bases += count
        rows = torch.from_numpy(np.concatenate(kept))
        return replace(
            self,
            spans=tuple(spans),
            bases=self.bases[rows],
            temperatures=self.temperatures[rows],
        )


class BatchOrder(Sequence[tuple[int, ...]]):
    """The samples of each step of a run, as indices; every epoch is another permutation."""

    def __init__(
        self, lengths: Sequence[int], *, num_epochs: int, batch_tokens: int, seed: int
    ) -> None:
        """lengths: tokens of each sample."""
        self._batches = list(
            chain.from_iterable(
                _batches(lengths, np.random.default_rng((seed, epoch)), batch_tokens)
                for epoch in range(num_epochs)
            )
        )

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, step: int) -> tuple[int, ...]:  # type: ignore[override]
        return self._batches[step]


def _batches(
    lengths: Sequence[int], generator: np.random.Generator, batch_tokens: int
) -> Iterator[tuple[int, ...]]:
    members, num_tokens = list[int](), 0
    for index in generator.permutation(len(lengths)).tolist():
        if members and num_tokens + lengths[index] > batch_tokens:
            yield tuple(members)
            members, num_tokens = [], 0
        members.append(index)
        num_tokens += lengths[index]
    if members:
        yield tuple(members)


def _flat(parts: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(list(chain.from_iterable(parts)), dtype=torch.int64)
