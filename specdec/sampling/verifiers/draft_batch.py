"""Drafts of a batch of sequences, as verifiers take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.types.drafts.draft_tree import Parents
from specdec.types.messages import DraftProbs
from specdec.types.sampling.sampling_spec import Verifier

VerifiedTokens = list[tuple[int, ...]]
"""The new tokens of each sequence: its accepted draft tokens, then one token of the target."""


@dataclass(frozen=True)
class Draft:
    """Draft tokens of one sequence (may be empty), and their verifier.

    probs: the distributions that the tokens were sampled from, if the verifier needs them; None if
        each token had probability 1.
    parents: the tree of the tokens, for the coupled verifier only; None for a chain.
    num_kept: of a chain whose tokens are accepted by chance, how many are; else -1.
    """

    token_ids: Sequence[int]
    verifier: Verifier = field(default_factory=Verifier)
    probs: DraftProbs | None = None
    parents: Parents | None = None
    num_kept: int = -1


class Candidates(NamedTuple):
    """The tokens that each draft token was sampled from, padded to K with probability 0."""

    token_ids: Tensor  # [B, N, K] int64
    probs: Tensor  # [B, N, K] float64


@dataclass(frozen=True)
class DraftBatch:
    """Chains of drafts of B sequences, padded to N tokens, and the rows of logits that verify them.

    A sequence has len(draft) + 1 rows, in the order of its tokens: the row of the base token, then
    one for each draft token. The row of a draft token is that of the token before it, so the last
    row of a sequence has no draft token. N is at least 1.
    """

    drafts: Sequence[Draft]
    device: torch.device

    @cached_property
    def num_drafts(self) -> Tensor:
        """Number of draft tokens of each sequence, [B, 1] int64."""
        lengths = [[len(draft.token_ids)] for draft in self.drafts]
        return torch.tensor(lengths, device=self.device)

    @cached_property
    def token_ids(self) -> Tensor:
        """The draft tokens, [B, N] int64."""
        size = max(1, *(len(draft.token_ids) for draft in self.drafts))
        padded = [[*each.token_ids, *[0] * (size - len(each.token_ids))] for each in self.drafts]
        return torch.tensor(padded, device=self.device)

    @cached_property
    def places(self) -> Tensor:
        """Distance of each row from the first one of its sequence, [N + 1] int64."""
        return torch.arange(self.token_ids.shape[1] + 1, device=self.device)

    @cached_property
    def rows(self) -> Tensor:
        """The rows of each sequence, padded with the last one, [B, N + 1] int64."""
        lengths = [len(draft.token_ids) for draft in self.drafts]
        last = [end - 1 for end in accumulate(length + 1 for length in lengths)]
        size = max(1, *lengths)
        rows = [
            [end - max(0, length - place) for place in range(size + 1)]
            for end, length in zip(last, lengths, strict=True)
        ]
        return torch.tensor(rows, device=self.device)

    @cached_property
    def is_draft(self) -> Tensor:
        """Return whether each place has a draft token, [B, N] bool."""
        return self.places[:-1] < self.num_drafts

    @cached_property
    def candidates(self) -> Candidates:
        """The draft distributions; those of a draft without any are certain of its tokens."""
        listed = [each.probs or _certain(each.token_ids) for each in self.drafts]
        size = (*self.token_ids.shape, max(each.probs.shape[1] for each in listed))
        token_ids, probs = np.zeros(size, np.int64), np.zeros(size, np.float64)
        for index, each in enumerate(listed):
            count, width = each.probs.shape
            token_ids[index, :count, :width] = each.token_ids
            probs[index, :count, :width] = each.probs
        return Candidates(*(torch.from_numpy(each).to(self.device) for each in (token_ids, probs)))

    @cached_property
    def probs(self) -> Tensor:
        """The draft probability of each draft token, [B, N] float64; 0 for padding."""
        is_own = self.candidates.token_ids == self.token_ids[:, :, None]
        return (self.candidates.probs * is_own).sum(2)

    def per_sequence(self, values: Sequence[float]) -> Tensor:
        """Return a value for each sequence, [B, 1] float64."""
        return torch.tensor(values, dtype=torch.float64, device=self.device)[:, None]

    def num_leading(self, is_kept: Tensor) -> Tensor:
        """Count the draft tokens before the first one that is not kept, [B, 1] int64.

        is_kept: [B, N] bool.
        """
        return (is_kept & self.is_draft).long().cumprod(1).sum(1, keepdim=True)

    def verified(self, num_accepted: Tensor, last_tokens: Tensor) -> VerifiedTokens:
        """Return the first `num_accepted` draft tokens of each sequence, then its last token.

        num_accepted, last_tokens: [B, 1] int64.
        """
        ends = torch.cat([num_accepted, last_tokens], 1).tolist()
        pairs = zip(self.drafts, ends, strict=True)
        return [(*draft.token_ids[:count], token) for draft, (count, token) in pairs]


def _certain(token_ids: Sequence[int]) -> DraftProbs:
    """Return distributions that give each token probability 1."""
    listed = np.array(token_ids, dtype=np.int32).reshape(-1, 1)
    return DraftProbs(listed, np.ones(listed.shape, dtype=np.float32))
