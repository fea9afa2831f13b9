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

from specdec.training.data.corpus import Sample


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

    A *base* is a token of an answer with a token after it: drafts follow it, as in serving, where
    the target verified it. Draft token i of the base at position b stands for position b + 1 + i.
    At first all such tokens are bases.

    token_ids, next_ids, positions: of the T tokens that the target runs, and of those after them.
    bases: their places among the T tokens. ends: of the sample of each base, in the T tokens.
    temperatures: of the sample of each base.
    original: the batch on the host that this one is a copy of; None on the host.
    """

    spans: tuple[Span, ...]
    token_ids: Tensor  # [T] int64
    next_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    bases: Tensor  # [R] int64
    ends: Tensor  # [R] int64
    temperatures: Tensor  # [R] float32
    original: Batch | None = None

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
        counts = np.array([span.num_bases for span in spans])
        stops = np.array([span.tokens.stop for span in spans])
        temperatures = np.array([each.temperature for each in samples], np.float32)
        return cls(
            tuple(spans),
            _joined([each.token_ids[:-1] for each in samples]),
            _joined([each.token_ids[1:] for each in samples]),
            _joined([range(span.num_tokens) for span in spans]),
            _joined([range(span.tokens.stop - span.num_bases, span.tokens.stop) for span in spans]),
            torch.from_numpy(stops.repeat(counts)),
            torch.from_numpy(temperatures.repeat(counts)),
        )

    @property
    def host(self) -> Batch:
        """This batch on the host, whose values are read without waiting for a device."""
        return self.original or self

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.token_ids.device

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device, without waiting for the copies."""
        if device.type == "cpu":
            return self
        return replace(
            self,
            token_ids=to_device(self.token_ids, device),
            next_ids=to_device(self.next_ids, device),
            positions=to_device(self.positions, device),
            bases=to_device(self.bases, device),
            ends=to_device(self.ends, device),
            temperatures=to_device(self.temperatures, device),
            original=self,
        )

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def num_bases(self) -> int:
        """R."""
        return len(self.bases)

    def after(self, offset: int) -> Tensor:
        """Return the places of the tokens `offset` after the bases, [R] int64.

        Where a sample ends earlier it is some other token.
        """
        return (self.bases + offset).clamp(max=self.num_tokens - 1)

    def places(self, depth: int) -> Tensor:
        """Return `after` for each draft token: of the one before it, [depth, R] int64."""
        return torch.stack([self.after(index) for index in range(depth)])

    def exists(self, depth: int) -> Tensor:
        """Return whether a sample has a token for each draft token, [depth, R] bool."""
        return torch.arange(depth, device=self.device)[:, None] < self.ends - self.bases

    def distinct_places(self, bases: slice, depth: int) -> tuple[Tensor, Tensor]:
        """Return the distinct `places` of some bases, [D] int64, and the place of each in them.

        Draft token i of a base may be draft token 0 of another one. The second tensor has the shape
        of the places, [depth, c] int64. Both are on the device; they are computed on the host.
        """
        places = self.host.bases[bases].numpy() + np.arange(depth)[:, None]
        places = places.clip(max=self.num_tokens - 1)
        is_used = np.zeros(self.num_tokens, bool)
        is_used[places] = True
        rows = (is_used.cumsum() - 1)[places]
        distinct = np.flatnonzero(is_used)
        own, indices = (to_device(torch.from_numpy(each), self.device) for each in (distinct, rows))
        return own, indices

    def with_bases(self, limit: int, generator: np.random.Generator) -> Batch:
        """Return a batch on the host with at most `limit` bases of each sample, drawn at random."""
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
            ends=self.ends[rows],
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


def _joined(parts: Sequence[Sequence[int]]) -> Tensor:
    num_tokens = sum(map(len, parts))
    return torch.from_numpy(np.fromiter(chain.from_iterable(parts), np.int64, num_tokens))


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy values from the host to a device, without waiting for what the device is doing."""
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)
