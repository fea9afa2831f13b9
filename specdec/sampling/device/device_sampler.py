"""Sampling in tensors of fixed shape: the device samples and verifies without the host.

The tokens are those of `sampler`, which selects rows and chunks on the host to save arithmetic.
Here the noise of the whole vocabulary is computed. Of several ranks, one gather carries the best
logit of a row, its token and faults where all rows are greedy; others are sampled as whole rows, of
which each rank has a share (`row_exchange`). This is the reference for device kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specdec.kernels.reference.sample_rows import RowArgmax
from specdec.kernels.reference.triton_availability import has_triton
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.sampling.device.device_truncation import DeviceLimits, device_floors
from specdec.sampling.gumbel import NoiseKeys, gumbel_noise
from specdec.sampling.row_exchange import exchanged_slabs, gather_rows, own_rows, whole_rows
from specdec.sampling.sampler import LEAST_SCORE
from specdec.sampling.vocab_shard import ScoreChunks, VocabShard
from specdec.types.sampling.sampling_spec import SamplingRules

if TYPE_CHECKING:
    from specdec.kernels.triton.sample import RowSampling

SLAB_LOGITS = 2**23
"""Logits that torch's operators sample at once, which take about 50 bytes each."""


class SamplingKind(IntEnum):
    """The work that the rows of a step need at most; a row may need less."""

    GREEDY = 0
    SAMPLED = 1
    TRUNCATED = 2


def kind_of(rules: SamplingRules) -> SamplingKind:
    """Return the work that the rows of a sequence need."""
    if rules.temperature == 0:
        return SamplingKind.GREEDY
    is_truncated = rules.top_k > 0 or rules.top_p < 1 or rules.min_p > 0
    return SamplingKind.TRUNCATED if is_truncated else SamplingKind.SAMPLED


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
    if shard.group.size == 1:
        return _sample_whole(logits, rules, kind)
    if rules is None:
        return _best_of_ranks(logits, shard)
    slabs = exchanged_slabs(len(logits), shard)
    parts = [_sample_exchanged(logits[slab], rules[slab], kind, shard) for slab in slabs]
    return DeviceSample(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _best_of_ranks(logits: Tensor, shard: VocabShard) -> DeviceSample:
    """Return the best tokens of all ranks; one gather."""
    best = _argmax(logits)
    columns = (best.values, best.token_ids + shard.first_token, best.has_nan)
    own = torch.stack([column.double() for column in columns], 1)  # float64 holds each exactly
    values, token_ids, has_nan = shard.group.all_gather(own).unbind(2)  # [size, num_rows] each
    # Of ranks with equal scores, argmax takes the first, which has the lowest token ids.
    ranks = values.argmax(0, keepdim=True)
    is_empty = values.amax(0) == -torch.inf
    found = token_ids.gather(0, ranks).squeeze(0).long()
    return DeviceSample(found, is_empty | (has_nan.amax(0) > 0))


def _sample_exchanged(
    logits: Tensor, rules: DeviceRules, kind: SamplingKind, shard: VocabShard
) -> tuple[Tensor, Tensor]:
    """Return the columns of a DeviceSample; an exchange of the logits, and a gather."""
    num_rows, rows = len(logits), own_rows(len(logits), shard)
    whole = whole_rows(logits, shard)
    own = torch.zeros(len(whole), 2, dtype=torch.int64, device=logits.device)
    if len(whole) > 0:
        sample = _sample_whole(whole, rules[rows], kind)
        own[:, 0], own[:, 1] = sample.token_ids, sample.is_invalid
    token_ids, is_invalid = gather_rows(own, num_rows, shard).unbind(1)
    return token_ids, is_invalid > 0


def _sample_whole(logits: Tensor, rules: DeviceRules | None, kind: SamplingKind) -> DeviceSample:
    """Sample rows of the whole vocabulary on this rank; as `sample_on_device`."""
    if has_triton(logits.device):
        return _triton_sample(logits, rules, kind)
    if rules is None:
        best = torch_argmax(logits)
        return DeviceSample(best.token_ids, best.has_nan | (best.values == -torch.inf))
    size = max(1, SLAB_LOGITS // logits.shape[1])
    slabs = [slice(start, start + size) for start in range(0, len(logits), size)]
    parts = [_torch_sample(logits[slab], rules[slab], kind) for slab in slabs]
    return DeviceSample(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _triton_sample(logits: Tensor, rules: DeviceRules | None, kind: SamplingKind) -> DeviceSample:
    from specdec.kernels.triton.sample import sample_rows  # imports Triton

    if rules is None:
        argmax = _argmax(logits)
        token_ids = argmax.token_ids
    else:
        sampling = row_sampling(rules)
        truncates = kind is SamplingKind.TRUNCATED
        sampled = sample_rows(logits, sampling, LEAST_SCORE, truncates=truncates)
        token_ids, argmax = sampled.token_ids, sampled.argmax
    return DeviceSample(token_ids, argmax.has_nan | (argmax.values == -torch.inf))


def row_sampling(rules: DeviceRules) -> RowSampling:
    """Return the parameters as Triton's kernels take them."""
    from specdec.kernels.triton.sample import RowSampling  # imports Triton

    limits, keys = rules.limits, rules.keys
    columns = (
        *(rules.temperatures, limits.top_k, limits.top_p, limits.min_scores),
        *(keys.seeds, keys.choices, keys.positions),
    )
    return RowSampling(*(column.contiguous() for column in columns))


def _torch_sample(logits: Tensor, rules: DeviceRules, kind: SamplingKind) -> tuple[Tensor, Tensor]:
    """Return the columns of a DeviceSample, by torch's operators."""
    best, perturbed = torch_argmax(logits), perturbed_scores(logits, rules, kind)
    token_ids = torch.where(rules.temperatures > 0, perturbed.argmax(1), best.token_ids)
    return token_ids, best.has_nan | (best.values == -torch.inf)


def perturbed_scores(logits: Tensor, rules: DeviceRules, kind: SamplingKind) -> Tensor:
    """Return the scores with noise of rows of the whole vocabulary, [num_rows, vocab_size] float32.

    Those of tokens that are cut are -inf; a row of temperature 0 has those of temperature 1.
    """
    chunks = ScoreChunks.of_logits(logits, 0)
    chunks.scale(rules.temperatures.masked_fill(rules.temperatures == 0, 1), TensorParallelGroup())
    scores = chunks.scores.flatten(1)
    perturbed = scores + _noise(rules.keys, chunks).view_as(scores)
    if kind is SamplingKind.TRUNCATED:
        floors = device_floors(scores, rules.limits)
        perturbed.masked_fill_(scores < floors.unsqueeze(1), -torch.inf)
    return perturbed[:, : logits.shape[1]]


def _argmax(logits: Tensor) -> RowArgmax:
    """Return the argmax of each row, by one of the kernels of the device."""
    if has_triton(logits.device):
        from specdec.kernels.triton.sample import TileArgmax  # imports Triton

        return TileArgmax(logits).reduce()
    return torch_argmax(logits)


def torch_argmax(logits: Tensor) -> RowArgmax:
    """Return the argmax of each row; of a row with NaN or +inf any token. Reads no value."""
    values = logits.amax(1)  # propagates NaN
    has_nan = ~(values < torch.inf)
    # Of equals the first; of a row with NaN, the NaN.
    return RowArgmax(values.masked_fill(has_nan, torch.inf).float(), logits.argmax(1), has_nan)


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


def _noise(keys: NoiseKeys, chunks: ScoreChunks) -> Tensor:
    """Return the noise of all tokens, [num_rows * num_columns, CHUNK_TOKENS] float32."""
    num_rows, num_columns, _ = chunks.scores.shape
    ids = chunks.first_chunk + torch.arange(num_columns, device=chunks.scores.device)
    columns = (
        values.unsqueeze(1).expand(num_rows, num_columns).flatten()
        for values in (keys.seeds, keys.choices, keys.positions)
    )
    return gumbel_noise(NoiseKeys(*columns), ids.expand(num_rows, num_columns).flatten())
