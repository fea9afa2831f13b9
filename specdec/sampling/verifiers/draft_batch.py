"""Input and output of verifiers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specdec.sampling.distribution import TokenWeights
from specdec.types.drafts.draft_tree import Parents
from specdec.types.messages import DraftProbs
from specdec.types.sampling.sampling_spec import Verifier

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Draft:
    """Draft tokens of one sequence (may be empty), and their verifier.

    probs: the distributions that the tokens were sampled from, if the verifier needs them; None if
        each token had probability 1.
    parents: the tree of the tokens, for the coupled verifier only; None for a chain.
    """

    token_ids: Sequence[int]
    verifier: Verifier = field(default_factory=Verifier)
    probs: DraftProbs | None = None
    parents: Parents | None = None


@dataclass(frozen=True)
class VerifiedTokens:
    """The new tokens of each sequence: its accepted draft tokens, then one token of the target.

    Iterating yields one tuple of token ids for each sequence.
    """

    token_ids: npt.NDArray[np.int32]  # [sum of num_tokens]
    num_tokens: npt.NDArray[np.int32]  # [num_sequences], from 1 up
    num_accepted: npt.NDArray[np.int32]  # [num_sequences], num_tokens - 1

    @classmethod
    def without_drafts(cls, token_ids: Int64Array) -> VerifiedTokens:
        """Wrap the tokens of sequences without drafts: one for each, [num_sequences]."""
        ones = np.ones(len(token_ids), dtype=np.int32)
        return cls(token_ids.astype(np.int32), ones, np.zeros_like(ones))

    @classmethod
    def of(cls, tokens: Sequence[tuple[int, ...]]) -> VerifiedTokens:
        """Wrap the new tokens of each sequence."""
        counts = np.array([len(each) for each in tokens], dtype=np.int32)
        return cls(np.fromiter(chain(*tokens), dtype=np.int32), counts, counts - 1)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        token_ids, end = self.token_ids.tolist(), 0
        for count in self.num_tokens.tolist():
            start, end = end, end + count
            yield tuple(token_ids[start:end])


@dataclass(frozen=True)
class DraftBatch:
    """Drafts of a batch of sequences, with the rows of logits that verify them.

    A sequence has len(draft) + 1 rows, in the order of its tokens: the row of the base token, then
    one for each draft token. The row of a draft token is that of the token before it, so the last
    row of a sequence has no draft token.
    """

    drafts: Sequence[Draft]
    device: torch.device

    @cached_property
    def num_drafted(self) -> Int64Array:
        """Number of draft tokens of each sequence, [num_sequences]."""
        return np.array([len(draft.token_ids) for draft in self.drafts], dtype=np.int64)

    @cached_property
    def ends(self) -> Int64Array:
        """The row after the last one of each sequence, [num_sequences]."""
        return np.cumsum(self.num_drafted + 1)

    @cached_property
    def starts(self) -> Int64Array:
        """The first row of each sequence, [num_sequences]."""
        return self.ends - self.num_drafted - 1

    @cached_property
    def offsets(self) -> Int64Array:
        """Offset of each row from the first row of its sequence, [num_rows]."""
        return np.arange(self.num_rows) - self.starts[self.sequences]

    @cached_property
    def sequences(self) -> Int64Array:
        """The index of each row's sequence, [num_rows]."""
        return np.repeat(np.arange(len(self.drafts)), self.num_drafted + 1)

    @cached_property
    def is_drafted(self) -> BoolArray:
        """Return whether each row has a draft token, [num_rows]."""
        is_drafted = np.ones(self.num_rows, dtype=np.bool_)
        is_drafted[self.ends - 1] = False
        return is_drafted

    @property
    def num_rows(self) -> int:
        """Number of rows of logits."""
        return int(self.num_drafted.sum()) + len(self.drafts)

    @cached_property
    def rows(self) -> Tensor:
        """The row of each draft token, [num_draft_tokens] int64."""
        return self.tensor(np.flatnonzero(self.is_drafted))

    @cached_property
    def tokens(self) -> Tensor:
        """All draft tokens, [num_draft_tokens] int64."""
        return self.tensor(self.token_ids)

    @cached_property
    def token_ids(self) -> Int64Array:
        """All draft tokens, [num_draft_tokens]."""
        return np.fromiter(chain(*(draft.token_ids for draft in self.drafts)), dtype=np.int64)

    @property
    def is_last(self) -> Tensor:
        """Return whether each draft token is the last of its draft, [num_draft_tokens] bool."""
        return self.tensor(~self.is_drafted[1:][self.is_drafted[:-1]])

    def per_draft_token(self, values: Sequence[float]) -> Tensor:
        """Repeat the value of each sequence for its draft tokens, [num_draft_tokens] float64."""
        return self.tensor(np.repeat(np.array(values, dtype=np.float64), self.num_drafted))

    def draft_probs(self) -> TokenWeights:
        """Return the draft distributions; `rows` are rows of the batch."""
        listed = [draft.probs or _certain(draft.token_ids) for draft in self.drafts]
        widths = np.array([each.probs.shape[1] for each in listed], dtype=np.int64)
        rows = np.repeat(np.flatnonzero(self.is_drafted), np.repeat(widths, self.num_drafted))
        token_ids = np.concatenate([each.token_ids.ravel() for each in listed])
        probs = np.concatenate([each.probs.ravel() for each in listed])
        rows, token_ids, probs = (array[probs > 0] for array in (rows, token_ids, probs))
        return TokenWeights(
            self.tensor(rows),
            self.tensor(token_ids.astype(np.int64)),
            self.tensor(probs.astype(np.float64)),
        )

    def probs_of_drafts(self, draft_probs: TokenWeights) -> Tensor:
        """Return the draft probability of each draft token, [num_draft_tokens] float64."""
        row_tokens = torch.full((self.num_rows,), -1, device=self.device)
        row_tokens[self.rows] = self.tokens
        is_own = draft_probs.token_ids == row_tokens[draft_probs.rows]
        probs = torch.zeros(self.num_rows, dtype=torch.float64, device=self.device)
        probs[draft_probs.rows[is_own]] = draft_probs.weights[is_own]
        return probs[self.rows]

    def confidences(self) -> Tensor:
        """Return the draft probability of each draft token, 0 for drafts without probabilities.

        Returns [num_draft_tokens] float64.
        """
        is_known = self.per_draft_token([each.probs is not None for each in self.drafts])
        return self.probs_of_drafts(self.draft_probs()) * is_known

    def num_leading(self, is_kept: BoolArray) -> Int64Array:
        """Count the draft tokens of each sequence before the first one that is not kept.

        is_kept: [num_draft_tokens] bool. Returns [num_sequences].
        """
        continues = self.is_drafted.copy()
        continues[self.is_drafted] = is_kept
        stops = np.flatnonzero(~continues)  # at least the last row of every sequence
        return stops[np.searchsorted(stops, self.starts)] - self.starts

    def num_until_last(self, is_accepted: BoolArray) -> Int64Array:
        """Count the draft tokens of each sequence up to its last accepted one.

        is_accepted: [num_draft_tokens] bool. Returns [num_sequences].
        """
        lengths = np.zeros(self.num_rows, dtype=np.int64)
        lengths[self.is_drafted] = is_accepted
        lengths *= self.offsets + 1
        return np.maximum.reduceat(lengths, self.starts)

    def verified(self, num_accepted: Int64Array, last_tokens: Int64Array) -> VerifiedTokens:
        """Return the accepted draft tokens of each sequence, followed by its last token.

        num_accepted, last_tokens: [num_sequences].
        """
        token_ids = np.zeros(self.num_rows, dtype=np.int32)
        token_ids[self.is_drafted] = self.token_ids
        token_ids[self.starts + num_accepted] = last_tokens
        is_output = self.offsets <= num_accepted[self.sequences]
        counts = num_accepted.astype(np.int32)
        return VerifiedTokens(token_ids[is_output], counts + 1, counts)

    def tensor(self, values: npt.NDArray[np.generic]) -> Tensor:
        """Copy `values` to the device of the logits."""
        return torch.from_numpy(values).to(self.device)


def _certain(token_ids: Sequence[int]) -> DraftProbs:
    """Return distributions that give each token probability 1."""
    listed = np.array(token_ids, dtype=np.int32).reshape(-1, 1)
    return DraftProbs(listed, np.ones(listed.shape, dtype=np.float32))
