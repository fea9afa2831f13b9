"""Synthetic acceptance, for measurements: a draft token is kept by chance, whatever it is.

It prices load, control and verification of a method at a given acceptance, without a trained draft
model. The output is not the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice, repeat

import numpy as np
import torch

from specdec.sampling.gumbel import NoiseKeys, Stream, uniforms
from specdec.types.sampling.sampling_spec import SamplingRules


def num_kept_by_chance(drafts: Sequence[tuple[SamplingRules, range]]) -> list[int]:
    """Return the number of draft tokens of each sequence that are kept, each with its place's rate.

    The rate of a place is the probability that its token is kept if those before it were; a place
    beyond the verifier's rates has rate 0. A uniform number that depends on seed, choice and
    position alone decides, so equal requests accept equally.

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
