"""Coupled verification: a draft token is accepted when the target draws the same one anyway.

Every output token is defined by the target's scores and by Gumbel noise that draft and target share
(`specdec.sampling`), so a draft changes when tokens come, never which. Daliri, Musco and Suresh,
"Coupling without Communication and Drafter-Invariant Speculative Decoding", arXiv 2408.07978: with
total variation TV between the two distributions, a draft that is drawn with the same noise is
accepted with a probability of at least (1 - TV) / (1 + TV).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
from torch import Tensor


@dataclass(frozen=True)
class VerifiedTokens:
    """The new tokens of each sequence: its accepted draft tokens, then one of the target's own.

    Iterating gives one tuple of token ids a sequence.
    """

    token_ids: npt.NDArray[np.int32]  # [sum of num_tokens]
    num_tokens: npt.NDArray[np.int32]  # [num_sequences], from 1 up
    num_accepted: npt.NDArray[np.int32]  # [num_sequences], num_tokens - 1

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        ends = np.cumsum(self.num_tokens)
        for start, end in zip(ends - self.num_tokens, ends, strict=True):
            yield tuple(self.token_ids[start:end].tolist())


def verify_coupled(sampled: Tensor, drafts: Sequence[Sequence[int]]) -> VerifiedTokens:
    """The longest prefix of each draft that the target draws too, and the target's token after it.

    sampled: [num_rows] int64, the tokens that the target draws after the base token and after each
    draft token of the first sequence, then of the second, and so on: len(draft) + 1 rows each. A
    draft may be empty.
    """
    tokens = sampled.cpu().numpy().astype(np.int32)
    num_rows = np.array([len(draft) + 1 for draft in drafts], dtype=np.int64)
    ends = np.cumsum(num_rows)
    assert len(tokens) == num_rows.sum(), (len(tokens), num_rows)

    is_drafted = np.ones(len(tokens), dtype=np.bool_)
    is_drafted[ends - 1] = False  # after the last draft token there is nothing to compare
    is_accepted = is_drafted.copy()
    is_accepted[is_drafted] = tokens[is_drafted] == np.fromiter(chain(*drafts), dtype=np.int64)

    stops = np.flatnonzero(~is_accepted)  # at least the last row of every sequence
    first_stops = stops[np.searchsorted(stops, ends - num_rows)]
    num_accepted = (first_stops - (ends - num_rows)).astype(np.int32)
    is_output = np.arange(len(tokens)) <= np.repeat(first_stops, num_rows)
    return VerifiedTokens(tokens[is_output], num_accepted + 1, num_accepted)
