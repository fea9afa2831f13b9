"""Sampling in tensors of fixed shape: the device samples and verifies without the host.

The tokens are those of `sampler`, which selects rows and chunks on the host to save arithmetic.
Here the noise of the whole vocabulary is computed, and one gather carries the best score, its token
and the faults of a row over all ranks. This is the reference for device kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.triton.availability import has_triton
from specdec.sampling.device_truncation import DeviceLimits, device_floors
from specdec.sampling.gumbel import CHUNK_TOKENS, NoiseKeys, gumbel_noise
from specdec.sampling.sampler import LEAST_SCORE
from specdec.sampling.vocab_shard import ScoreChunks, VocabShard

_SLAB_LOGITS = 2**23
"""Logits of all ranks that are sampled at once, which take about 50 bytes each."""


class SamplingKind(IntEnum):
    """The work that the rows of a step need at most; a row may need less."""

    GREEDY = 0
    SAMPLED = 1
    TRUNCATED = 2


@dataclass(frozen=True)
class DeviceRules:
    """Sampling parameters of rows of logits, on the device."""

    temperatures: Tensor  # [num_rows] float32; 0: greedy
    limits: DeviceLimits
    keys: NoiseKeys

    def __getitem__(self, rows: slice) -> DeviceRules:
        return DeviceRules(self.temperatures[rows], self.limits[rows], self.keys[rows])


@dataclass(frozen=True)
class DeviceSample:
    """Tokens of rows of logits.

    is_invalid: whether no token can be sampled, for NaN or +inf, or for -inf alone.
    """

    token_ids: Tensor  # [num_rows] int64
    is_invalid: Tensor  # [num_rows] bool


def sample_on_device(
    logits: Tensor,  # [num_rows, num_tokens]
    rules: DeviceRules | None,
    kind: SamplingKind,
    shard: VocabShard,
) -> DeviceSample:
    """Sample each row, without a value that the host has to read; equal on every rank.

    A collective call; every rank passes the same rules. logits: of this rank, of any float type.
    rules: None for GREEDY. Rows of temperature 0 take the argmax, whatever the kind is.
    """
    logits = logits[:, : shard.vocab_size - shard.first_token]
    if shard.group.size == 1 and has_triton(logits.device):
        return _triton_sample(logits, rules, kind)
    size = max(1, _SLAB_LOGITS // shard.vocab_size)
    slabs = [slice(start, start + size) for start in range(0, len(logits), size)]
    parts = [
        _best(logits[slab]) if rules is None else _sampled(logits[slab], rules[slab], kind, shard)
        for slab in slabs
    ]
    best = parts[0] if len(parts) == 1 else torch.cat(parts)
    if rules is None:
        best[:, 1] += shard.first_token
    return _best_of_ranks(shard.group.all_gather(best))


def _triton_sample(logits: Tensor, rules: DeviceRules | None, kind: SamplingKind) -> DeviceSample:
    """Sample the whole vocabulary on this rank; as `sample_on_device`."""
    from specdec.kernels.triton.sample import RowSampling, TileArgmax, sample_rows  # imports Triton

    if rules is None:
        argmax = TileArgmax(logits).reduce()
        token_ids = argmax.token_ids
    else:
        limits, keys = rules.limits, rules.keys
        columns = (
            *(rules.temperatures, limits.top_k, limits.top_p, limits.min_scores),
            *(keys.seeds, keys.choices, keys.positions),
        )
        sampling = RowSampling(*(column.contiguous() for column in columns))
        truncates = kind is SamplingKind.TRUNCATED
        sampled = sample_rows(logits, sampling, LEAST_SCORE, truncates=truncates)
        token_ids, argmax = sampled.token_ids, sampled.argmax
    return DeviceSample(token_ids, argmax.has_nan | (argmax.values == -torch.inf))


@dataclass(frozen=True)
class DeviceChains:
    """Chains of drafts of B sequences, padded to Q - 1 tokens.

    num_kept: of a sequence whose drafts are accepted by chance, how many are; else -1.
    """

    token_ids: Tensor  # [B, Q - 1] int64
    num_drafts: Tensor  # [B] int64
    num_kept: Tensor  # [B] int64


class VerifiedChains(NamedTuple):
    """New tokens of B sequences: of each the first `counts`, from 0 to Q."""

    token_ids: Tensor  # [B, Q] int64
    counts: Tensor  # [B] int64


def verify_chains(sample: DeviceSample, drafts: DeviceChains) -> VerifiedChains:
    """Verify chains of drafts: coupled verification (`verifiers.coupled`), or by chance.

    A draft token is accepted where the target samples the same one, so the new tokens are the
    sampled ones up to the first that differs, and before the first row that is invalid.

    sample: of B sequences with Q rows each.
    """
    num_sequences, num_places = drafts.token_ids.shape
    if num_places and has_triton(sample.token_ids.device):
        return _walked_chains(sample, drafts)
    sampled = sample.token_ids.view(num_sequences, -1)
    is_valid = ~sample.is_invalid.view(num_sequences, -1)
    if num_places == 0:
        return VerifiedChains(sampled, is_valid.long().squeeze(1))
    places, num_kept = torch.arange(num_places, device=sampled.device), drafts.num_kept[:, None]
    is_equal = (sampled[:, :-1] == drafts.token_ids) & (places < drafts.num_drafts[:, None])
    is_accepted = torch.where(num_kept >= 0, places < num_kept, is_equal)
    is_output = torch.nn.functional.pad(is_accepted, (1, 0), value=True) & is_valid
    accepted = torch.where(is_accepted, drafts.token_ids, sampled[:, :-1])
    return VerifiedChains(
        torch.cat([accepted, sampled[:, -1:]], 1), is_output.long().cumprod(1).sum(1)
    )


def _walked_chains(sample: DeviceSample, drafts: DeviceChains) -> VerifiedChains:
    """Verify chains by the kernel that walks through trees; as `verify_chains`."""
    from specdec.kernels.triton.verify import walk_trees  # imports Triton

    parents = torch.arange(-1, drafts.token_ids.shape[1] - 1, device=drafts.token_ids.device)
    parents = parents.expand_as(drafts.token_ids)
    chains = (drafts.token_ids, parents, drafts.num_drafts, drafts.num_kept)
    walked = walk_trees(sample.token_ids, sample.is_invalid, *chains)
    return VerifiedChains(walked.token_ids, walked.num_tokens)


def _best(logits: Tensor) -> Tensor:
    """Return the best of each row on this rank: score, index, greatest logit, and whether it fails.

    Returns [num_rows, 4] float64, which holds each exactly. NaN and +inf are faults.
    """
    greatest = logits.amax(1, keepdim=True)  # propagates NaN
    columns = logits.argmax(1, keepdim=True)  # of equals the first; of a row with NaN, the NaN
    is_faulty = ~(greatest < torch.inf)
    return torch.cat(
        [greatest.double(), columns.double(), greatest.double(), is_faulty.double()], 1
    )


def _sampled(logits: Tensor, rules: DeviceRules, kind: SamplingKind, shard: VocabShard) -> Tensor:
    """Return the best of each row as `_best`, by score with noise where the row is not greedy.

    The index is a token id. A collective call.
    """
    greedy = _best(logits)
    greedy[:, 1] += shard.first_token
    chunks = ScoreChunks.of_logits(logits, shard.first_token)
    chunks.scale(rules.temperatures.masked_fill(rules.temperatures == 0, 1), shard.group)
    scores = chunks.scores.flatten(1)
    perturbed = scores + _noise(rules.keys, chunks).view_as(scores)
    if kind is SamplingKind.TRUNCATED:
        floors = device_floors(scores, rules.limits, shard.group)
        perturbed.masked_fill_(scores < floors.unsqueeze(1), -torch.inf)
    columns = perturbed.argmax(1, keepdim=True)
    token_ids = columns + chunks.first_chunk * CHUNK_TOKENS
    best = torch.cat([perturbed.gather(1, columns).double(), token_ids.double(), greedy[:, 2:]], 1)
    return torch.where((rules.temperatures > 0).unsqueeze(1), best, greedy)


def _best_of_ranks(best: Tensor) -> DeviceSample:
    """Return the best token of each row; best: [size, num_rows, 4], as from `_best` by rank."""
    # Of ranks with equal scores, argmax takes the first, which has the lowest token ids.
    ranks = best[:, :, 0].argmax(0, keepdim=True)
    token_ids = best[:, :, 1].gather(0, ranks).squeeze(0).long()
    is_empty = best[:, :, 2].amax(0) == -torch.inf
    return DeviceSample(token_ids, is_empty | (best[:, :, 3].amax(0) > 0))


def _noise(keys: NoiseKeys, chunks: ScoreChunks) -> Tensor:
    """Return the noise of all tokens, [num_rows * num_columns, CHUNK_TOKENS] float32."""
    num_rows, num_columns, _ = chunks.scores.shape
    ids = chunks.first_chunk + torch.arange(num_columns, device=chunks.scores.device)
    columns = (
        values.unsqueeze(1).expand(num_rows, num_columns).flatten()
        for values in (keys.seeds, keys.choices, keys.positions)
    )
    return gumbel_noise(NoiseKeys(*columns), ids.expand(num_rows, num_columns).flatten())
