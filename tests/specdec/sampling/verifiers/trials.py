"""Fast generation of many texts with speculation, by models that are tables of logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.sampling.distribution import Distribution
from specdec.sampling.gumbel import Stream
from specdec.sampling.sampler import sample
from specdec.sampling.sampling_batch import SamplingBatch
from specdec.sampling.verifiers import VERIFY, Draft, DraftBatch
from specdec.sampling.vocab_shard import VocabShard
from specdec.types.messages import DraftProbs
from specdec.types.sampling.sampling_params import VerifierName
from tests.specdec.sampling.sampling_rows import sampling_rows

Model = Callable[[Tensor, Tensor], Tensor]
"""Function from last tokens [n] and positions of the next tokens [n] to logits [n, vocab_size]."""

_ROWS_AT_ONCE = 2**24  # elements of logits


def shard_of(vocab_size: int) -> VocabShard:
    return VocabShard(TensorParallelGroup(), 0, vocab_size)


def random_logits(num_rows: int, vocab_size: int, spread: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * spread


def markov(logits: Tensor) -> Model:
    """Make a model that depends on the last token only; logits: [vocab_size, vocab_size]."""
    return lambda tokens, positions: logits[tokens]


def positional(logits: Tensor) -> Model:
    """Make a model that depends on the position only; logits: [length, vocab_size]."""
    return lambda tokens, positions: logits[positions.clamp(max=len(logits) - 1)]


def sampling_batch(
    temperature: float, seeds: Tensor, positions: Tensor, **params: float
) -> SamplingBatch:
    return sampling_rows(positions.numpy(), temperature=temperature, seed=seeds.numpy(), **params)


class Verified(list[tuple[int, ...]]):
    """The new tokens of each sequence."""

    @property
    def num_accepted(self) -> np.ndarray:
        return np.array([len(tokens) - 1 for tokens in self])

    @property
    def token_ids(self) -> np.ndarray:
        return np.fromiter(chain(*self), np.int64)


def verified_by(
    name: VerifierName,
    logits: Tensor,
    batch: SamplingBatch,
    drafts: Sequence[Draft],
    shard: VocabShard | None = None,
) -> Verified:
    """Run a verifier; shard: by default all of the vocabulary."""
    own = DraftBatch(drafts, logits.device)
    return Verified(VERIFY[name](logits, batch, own, shard or shard_of(logits.shape[1])))


@dataclass(frozen=True)
class Trials:
    """The output of all trials. Trial i has seed i."""

    token_ids: np.ndarray  # [num_trials, length]
    num_accepted: np.ndarray  # of the first round of each trial
    num_drafted: int  # over all rounds
    num_kept: int  # over all rounds

    @property
    def acceptance_rate(self) -> float:
        return self.num_kept / max(1, self.num_drafted)


@dataclass(frozen=True)
class Speculation:
    """Generator of texts with speculation.

    num_listed: most tokens that a draft with known chances is drawn from. has_draft_probs: False
    for drafts that are the draft model's best token, as lookups are certain of theirs.
    """

    verifier: VerifierName
    target: Model
    draft: Model
    vocab_size: int
    temperature: float
    num_draft: int
    num_listed: int = 256
    top_k: int = 0
    top_p: float = 1.0
    has_draft_probs: bool = True

    def generate(self, num_trials: int, length: int) -> Trials:
        """Generate text after token 0."""
        size = max(1, _ROWS_AT_ONCE // (self.vocab_size + 64) // (self.num_draft + 1))
        parts = [
            self._generate(torch.arange(start, min(start + size, num_trials)), length)
            for start in range(0, num_trials, size)
        ]
        return Trials(
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([part.num_accepted for part in parts]),
            sum(part.num_drafted for part in parts),
            sum(part.num_kept for part in parts),
        )

    def _generate(self, seeds: Tensor, length: int) -> Trials:
        texts = torch.zeros(len(seeds), length + self.num_draft + 1, dtype=torch.int64)
        lengths = torch.zeros(len(seeds), dtype=torch.int64)
        last = torch.zeros(len(seeds), dtype=torch.int64)
        first_accepted, num_drafted, num_kept = np.zeros(len(seeds)), 0, 0
        while len(going := (lengths < length).nonzero().squeeze(1)):
            counts, new = self.round(seeds[going], lengths[going], last[going])
            if not lengths.any():
                first_accepted = counts - 1
            num_drafted += self.num_draft * len(going)
            num_kept += int(counts.sum()) - len(going)
            rows = going.repeat_interleave(torch.from_numpy(counts).long())
            offsets = np.arange(len(new)) - np.repeat(np.cumsum(counts) - counts, counts)
            texts[rows, lengths[rows] + torch.from_numpy(offsets)] = torch.from_numpy(new).long()
            lengths[going] += torch.from_numpy(counts).long()
            last[going] = texts[going, lengths[going] - 1]
        return Trials(texts[:, :length].numpy(), first_accepted, num_drafted, num_kept)

    def round(
        self, seeds: Tensor, positions: Tensor, last: Tensor
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of new tokens [n], and the concatenated tokens."""
        columns, listed = [last], []
        for offset in range(self.num_draft):
            tokens, draft_probs = self._drafted(columns[-1], seeds, positions + offset, offset)
            columns.append(tokens)
            listed.append(draft_probs)
        inputs = torch.stack(columns, dim=1)  # [n, 1 + num_draft]
        coming = positions.unsqueeze(1) + torch.arange(self.num_draft + 1)
        logits = self.target(inputs.flatten(), coming.flatten())
        batch = self._batch(seeds.repeat_interleave(self.num_draft + 1), coming.flatten())
        chances = _stacked(listed, len(seeds))
        drafts = [
            Draft(tokens, probs=probs)
            for tokens, probs in zip(inputs[:, 1:].tolist(), chances, strict=True)
        ]
        verified = verified_by(self.verifier, logits, batch, drafts)
        return verified.num_accepted + 1, verified.token_ids

    def _drafted(
        self, last: Tensor, seeds: Tensor, positions: Tensor, offset: int
    ) -> tuple[Tensor, DraftProbs | None]:
        """Sample a draft as the draft model runner does."""
        batch, shard = self._batch(seeds, positions), shard_of(self.vocab_size)
        logits = self.draft(last, positions)
        if not self.has_draft_probs:
            return logits.argmax(1), None
        if self.verifier not in ("rejection", "block"):
            return sample(logits, batch, shard), None
        listed = Distribution.of_logits(logits, batch, shard).top(self.num_listed)
        offsets = torch.full_like(positions, offset)
        drawn = listed.sample(batch.noise_keys.of_stream(Stream.DRAFT, offsets))
        token_ids = listed.token_ids.numpy().astype(np.int32)
        return drawn, DraftProbs(token_ids, listed.probs.numpy())

    def _batch(self, seeds: Tensor, positions: Tensor) -> SamplingBatch:
        return sampling_batch(
            self.temperature, seeds, positions, top_k=self.top_k, top_p=self.top_p
        )


def _stacked(listed: list[DraftProbs | None], count: int) -> list[DraftProbs | None]:
    """Return one entry for each trial, from one entry for each draft token."""
    if not listed or listed[0] is None:
        return [None] * count
    token_ids = np.stack([each.token_ids for each in listed if each], axis=1)
    probs = np.stack([each.probs for each in listed if each], axis=1)
    return [DraftProbs(*each) for each in zip(token_ids, probs, strict=True)]
