"""Synthetic acceptance, for measurements: a draft token is kept by chance, whatever it is.

It prices load, control and verification of a method at a given acceptance, without a trained draft
model. The output is not the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice, repeat

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specdec.sampling.gumbel import NoiseKeys, Stream, uniforms
from specdec.sampling.sampler import sample
from specdec.sampling.sampling_batch import SamplingBatch
from specdec.sampling.verifiers.draft_batch import DraftBatch, VerifiedTokens
from specdec.sampling.vocab_shard import VocabShard
from specdec.types.sampling.sampling_spec import SamplingRules


def verify_synthetic(
    logits: Tensor,  # [num_rows, num_tokens]
    batch: SamplingBatch,
    drafts: DraftBatch,
    shard: VocabShard,
) -> VerifiedTokens:
    """Keep each draft token with its place's rate; return the target's coupled token after them.

    The rate of a place is the probability that its token is kept if those before it were; a place
    beyond the verifier's rates has rate 0. A uniform number that depends on seed, choice and
    position alone decides, so equal requests accept equally. A collective call.
    """
    sampled = sample(logits, batch, shard).cpu().numpy()
    if not len(drafts.token_ids):
        return VerifiedTokens.without_drafts(sampled)
    keys = batch.noise_keys
    chances = uniforms(keys.of_stream(Stream.ACCEPTANCE, torch.zeros_like(keys.positions)))
    is_kept = chances[drafts.rows].cpu().numpy() < _rates(drafts)
    num_accepted = drafts.num_leading(is_kept)
    return drafts.verified(num_accepted, sampled[drafts.starts + num_accepted])


def num_kept_by_chance(drafts: Sequence[tuple[SamplingRules, range]]) -> list[int]:
    """Return the number of draft tokens of each sequence that `verify_synthetic` keeps.

    drafts: rules of each sequence, and of each of its draft tokens the index among the output
    tokens.
    """
    counts = np.array([len(positions) for _, positions in drafts], np.int64)
    if not counts.sum():
        return [0] * len(drafts)
    given = [(rules.seed, rules.choice, positions.start) for rules, positions in drafts]
    seeds, choices, starts = np.repeat(np.array(given, np.int64), counts, axis=0).T
    ends = counts.cumsum()
    places = np.arange(ends[-1]) - np.repeat(ends - counts, counts)  # in their drafts
    positions = torch.from_numpy(starts + places)
    keys = NoiseKeys(torch.from_numpy(seeds.copy()), torch.from_numpy(choices.copy()), positions)
    chances = uniforms(keys.of_stream(Stream.ACCEPTANCE, torch.zeros_like(positions))).numpy()
    rates = [
        rate
        for rules, own in drafts
        for rate in islice(chain(rules.verifier.synthetic_rates, repeat(0.0)), len(own))
    ]
    rejected = np.append(np.flatnonzero(~(chances < rates)), ends[-1])
    first_rejected = rejected[np.searchsorted(rejected, ends - counts)]
    num_kept: list[int] = (np.minimum(first_rejected, ends) - (ends - counts)).tolist()
    return num_kept


def _rates(drafts: DraftBatch) -> npt.NDArray[np.float64]:
    """Return the rate of each draft token, [num_draft_tokens]."""
    rates = np.zeros(len(drafts.token_ids))
    end = 0
    for draft in drafts.drafts:
        start, end = end, end + len(draft.token_ids)
        own = draft.verifier.synthetic_rates[: end - start]
        rates[start : start + len(own)] = own
    return rates
