"""Tests of synthetic acceptance: rates, independence of the draft, and the tokens after it."""

import numpy as np
import pytest
import torch

from specdec.sampling.verifiers import Draft
from specdec.sampling.verifiers.synthetic import num_kept_by_chance
from specdec.sampling.vocab_shard import VocabShard
from specdec.types.sampling.sampling_spec import SamplingRules, Verifier
from tests.specdec.fakes import run_ranks
from tests.specdec.sampling.chi_square import FALSE_ALARM, chi_square_p_value
from tests.specdec.sampling.verifiers.trials import random_logits, sampling_batch, verified_by

VOCAB_SIZE = 8
RATES = (0.9, 0.5, 0.25)


def kept(drafts, rates=RATES, seed=0, first=0):
    """Return the number of tokens of each draft that are kept by chance."""
    verifier = Verifier("synthetic", synthetic_rates=rates)
    return num_kept_by_chance(
        [
            (SamplingRules(seed=seed + place, verifier=verifier), range(first, first + len(draft)))
            for place, draft in enumerate(drafts)
        ]
    )


def verify(drafts, rates=RATES, temperature=1.0, seed=0, first=0):
    lengths = torch.tensor([len(draft) + 1 for draft in drafts])
    seeds = torch.arange(len(drafts)).repeat_interleave(lengths) + seed
    positions = torch.cat([torch.arange(length) for length in lengths]) + first
    logits = random_logits(int(lengths.sum()), VOCAB_SIZE, spread=1.0, seed=7)
    batch = sampling_batch(temperature, seeds, positions)
    counts = kept(drafts, rates, seed, first)
    listed = [Draft(draft, num_kept=count) for draft, count in zip(drafts, counts, strict=True)]
    return verified_by("synthetic", logits, batch, listed)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_number_of_accepted_tokens_has_the_configured_distribution(temperature):
    verified = verify([[0, 1, 2]] * 4000, temperature=temperature)
    probs = np.array([0.1, 0.9 * 0.5, 0.9 * 0.5 * 0.75, 0.9 * 0.5 * 0.25])
    assert chi_square_p_value(verified.num_accepted, probs) > FALSE_ALARM


def test_acceptance_depends_on_seed_and_position_alone():
    some, others = verify([[0, 1, 2]] * 300), verify([[7, 7, 7]] * 300)
    assert some.num_accepted.tolist() == others.num_accepted.tolist()
    assert verify([[0, 1, 2]] * 300, first=9).num_accepted.tolist() != some.num_accepted.tolist()
    alone = [verify([[0, 1, 2]], seed=seed).num_accepted[0] for seed in range(20)]
    assert alone == some.num_accepted[:20].tolist()


def test_the_targets_own_token_follows_the_accepted_ones():
    drafts = [[0, 1, 2]] * 50
    own = verify([[]] * 200, rates=())  # the same rows of logits, one for each sequence
    assert own.num_accepted.sum() == 0
    greedy = random_logits(200, VOCAB_SIZE, spread=1.0, seed=7).argmax(1).tolist()
    for index, tokens in enumerate(verify(drafts, temperature=0.0)):
        assert tokens[:-1] == (0, 1, 2)[: len(tokens) - 1]
        assert tokens[-1] == greedy[4 * index + len(tokens) - 1]


def test_drafts_of_any_length_are_kept_up_to_their_number():
    drafts = [[0] * (index % 5) for index in range(60)]
    counts = kept(drafts, first=9)
    assert counts == verify(drafts, first=9).num_accepted.tolist()
    assert counts == [
        min(count, len(draft))
        for count, draft in zip(kept([[0] * 5] * 60, first=9), drafts, strict=True)
    ]
    assert num_kept_by_chance([]) == []


def test_rates_of_0_and_1_and_places_beyond_the_rates():
    assert verify([[0, 1, 2, 3]], rates=(1.0, 1.0)).num_accepted.tolist() == [2]
    assert verify([[0, 1, 2, 3]] * 20, rates=()).num_accepted.max() == 0
    assert verify([[0, 1], [], [3, 4, 5]], rates=(1.0,) * 3).num_accepted.tolist() == [2, 0, 3]


def test_all_ranks_accept_the_same():
    logits = random_logits(40, 2 * VOCAB_SIZE, spread=1.0, seed=3)

    def verified(group):
        held = group.share_of(2 * VOCAB_SIZE)
        shard = VocabShard(group, held.start, 2 * VOCAB_SIZE)
        batch = sampling_batch(0.8, torch.arange(10).repeat_interleave(4), torch.arange(40) % 4)
        drafts = [Draft([1, 2, 3], num_kept=count) for count in kept([[1, 2, 3]] * 10)]
        own = logits[:, held.start : held.stop]
        return list(verified_by("synthetic", own, batch, drafts, shard))

    [alone] = run_ranks(1, verified)
    assert run_ranks(2, verified) == [alone, alone]
