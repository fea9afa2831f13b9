"""Sampling of one token for each row of logits, by ranks that each hold a part of the vocabulary.

Where all rows are greedy, the ranks gather the best logit of each, its token and faults. Others are
sampled as whole rows, of which each rank has a share (`row_exchange`). `device.device_sampler`
defines the token of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.sampling.device.device_sampler import DeviceRules, DeviceSample, sample_of, with_noise
from specdec.sampling.gumbel import NoiseKeys
from specdec.sampling.row_exchange import exchanged_rows
from specdec.sampling.sampling_batch import SamplingBatch
from specdec.sampling.vocab_shard import VocabShard, all_ranks_argmax


def sample(
    logits: Tensor,  # [num_rows, num_tokens]
    batch: SamplingBatch,
    shard: VocabShard,
) -> Tensor:
    """Sample each row; return token ids [num_rows] int64, the same on every rank.

    A collective call; every rank passes the same batch. logits: of this rank, of any float type.
    NaN counts as -inf; a row of -inf returns some token id below vocab_size.
    """
    logits = logits[:, : shard.vocab_size - shard.first_token]
    assert len(logits) == batch.num_rows, (len(logits), batch.num_rows)
    assert logits.shape[1] > 0, shard
    if not batch.is_any_sampled:
        best = shard.ops.argmax(logits) if batch.argmax is None else batch.argmax
        return all_ranks_argmax(best, shard).token_ids
    if shard.group.size == 1:
        return shard.ops.sample_batch(logits, batch)

    def sample_own(whole: Tensor, own: slice) -> Tensor:
        return shard.ops.sample_batch(whole, batch[own])[:, None]

    return exchanged_rows(logits, shard, sample_own, width=1).squeeze(1)


def sample_on_device(
    logits: Tensor,  # [num_rows, num_tokens]
    rules: DeviceRules | None,
    shard: VocabShard,
) -> DeviceSample:
    """Sample each row, without a value that the host has to read; equal on every rank.

    A collective call; every rank passes the same rules. logits, rules: as in `sample_rows`, but of
    this rank.
    """
    logits = logits[:, : shard.vocab_size - shard.first_token]
    if shard.group.size == 1:
        return shard.ops.sample(logits, rules)
    if rules is None:
        return sample_of(all_ranks_argmax(shard.ops.argmax(logits), shard))

    def sample_own(whole: Tensor, own: slice) -> Tensor:
        sampled = shard.ops.sample(whole, rules[own])
        return torch.stack([sampled.token_ids, sampled.is_invalid.long()], 1)

    token_ids, is_invalid = exchanged_rows(logits, shard, sample_own, width=2).unbind(1)
    return DeviceSample(token_ids, is_invalid > 0)


def sample_scores(scores: Tensor, keys: NoiseKeys, shard: VocabShard) -> Tensor:
    """Sample the softmax of each row's scores; return [num_rows] int64, equal on every rank.

    scores: [num_rows, num_tokens] float32, of this rank. An empty row returns some token id. A
    collective call, by torch on any device.
    """

    def sample_own(whole: Tensor, own: slice) -> Tensor:
        return with_noise(whole, keys[own], 1, on_host=True).argmax(1, keepdim=True)

    return exchanged_rows(scores, shard, sample_own, width=1).squeeze(1)
