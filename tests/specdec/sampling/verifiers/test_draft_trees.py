"""Lossless tests: walks through trees of drafts output the tokens of no speculation."""

import numpy as np
import pytest
import torch

from specdec.sampling.gumbel import CHUNK_TOKENS, gumbel_noise
from specdec.sampling.sampler import sample
from specdec.sampling.verifiers import Draft, verify_equal
from specdec.types.drafts.draft_tree import depths
from tests.specdec.sampling.chi_square import FALSE_ALARM, chi_square_p_value
from tests.specdec.sampling.verifiers.trials import (
    random_logits,
    sampling_batch,
    shard_of,
    verified_by,
)

VOCAB_SIZE = 8
NUM_TRIALS = 20_000
LENGTH = 3
TEMPERATURE = 0.8
PARENTS = (-1, -1, 0, 0, 1, 2, 2, -1)
TARGET = random_logits(VOCAB_SIZE, VOCAB_SIZE, spread=1.5, seed=0)
CLOSE = TARGET + random_logits(VOCAB_SIZE, VOCAB_SIZE, spread=0.7, seed=1)


def plain(seeds, length):
    """Sample `length` tokens after token 0 with each seed."""
    last, tokens = torch.zeros(len(seeds), dtype=torch.int64), []
    for position in range(length):
        batch = sampling_batch(TEMPERATURE, seeds, torch.full_like(seeds, position))
        last = sample(TARGET[last], batch, shard_of(VOCAB_SIZE))
        tokens.append(last)
    return torch.stack(tokens, dim=1).numpy()


def ranked_by_noise(last, seeds, position):
    """Rank tokens by the draft model's log-probability with the target's noise, best first."""
    batch = sampling_batch(TEMPERATURE, seeds, torch.full_like(seeds, position))
    noise = gumbel_noise(batch.noise_keys, torch.zeros_like(seeds))[:, :VOCAB_SIZE]
    return (CLOSE[last] / TEMPERATURE + noise).argsort(1, descending=True)


def ranked_by_chance(last, seeds, position):
    """Rank tokens without regard to the target's noise."""
    generator = torch.Generator().manual_seed(position)
    return torch.rand(len(seeds), VOCAB_SIZE, generator=generator).argsort(1)


def trees(seeds, rank):
    """Return the tokens of a tree for each seed, [num_trials, num_nodes]; siblings differ."""
    depth, columns, num_children = depths(PARENTS), [], {}
    for node, parent in enumerate(PARENTS):
        last = torch.zeros_like(seeds) if parent < 0 else columns[parent]
        place = num_children[parent] = num_children.get(parent, -1) + 1
        columns.append(rank(last, seeds, depth[node] - 1)[:, place])
    return torch.stack(columns, dim=1)


def verified(seeds, tokens):
    """Verify one tree for each seed after token 0; return the new tokens of each."""
    count, num_rows = len(seeds), len(PARENTS) + 1
    inputs = torch.cat([torch.zeros(count, 1, dtype=torch.int64), tokens], dim=1)
    positions = torch.tensor([0, *depths(PARENTS)]).repeat(count)
    batch = sampling_batch(TEMPERATURE, seeds.repeat_interleave(num_rows), positions)
    drafts = [Draft(each, parents=PARENTS) for each in tokens.tolist()]
    return verified_by("coupled", TARGET[inputs.flatten()], batch, drafts)


def test_chunks_hold_the_vocabulary():
    assert VOCAB_SIZE <= CHUNK_TOKENS


@pytest.mark.parametrize("rank", [ranked_by_noise, ranked_by_chance])
def test_walks_have_the_targets_distribution(rank):
    """Complete each walk with plain samples; the joint distribution is the target's."""
    seeds = torch.arange(NUM_TRIALS)
    expected = plain(seeds, LENGTH + 2)
    found = list(verified(seeds, trees(seeds, rank)))
    for tokens, text in zip(found, expected.tolist(), strict=True):
        assert list(tokens) == text[: len(tokens)]
    texts = np.array(
        [
            [*new, *text[len(new) :]][:LENGTH]
            for new, text in zip(found, expected.tolist(), strict=True)
        ]
    )
    probs = (TARGET.double() / TEMPERATURE).softmax(-1).numpy()
    joint = np.einsum("a,ab,bc->abc", probs[0], probs, probs).ravel()
    cells = texts @ [VOCAB_SIZE**2, VOCAB_SIZE, 1]
    assert chi_square_p_value(cells, joint) > FALSE_ALARM
    assert sum(map(len, found)) > 1.2 * NUM_TRIALS


def test_trees_and_chains_in_one_batch():
    seeds = torch.arange(40)
    tokens = trees(seeds, ranked_by_noise)
    both = list(verified(seeds, tokens))
    for seed, text, new in zip(seeds, tokens.tolist(), both, strict=True):
        chain = [text[node] for node in (0, 2, 5)]
        inputs = torch.tensor([0, *chain, 0, *text])
        positions = torch.tensor([0, 1, 2, 3, 0, *depths(PARENTS)])
        batch = sampling_batch(TEMPERATURE, seed.repeat(len(inputs)), positions)
        drafts = [Draft(chain), Draft(text, parents=PARENTS)]
        short, long = verified_by("coupled", TARGET[inputs], batch, drafts)
        assert long == new
        assert short == new[: len(short)]


def test_greedy_walks_through_trees_and_chains():
    best = [3, 4, 0, 1, 7, 5, 6, 2]
    drafts = [([3, 4], None, -1), ([], None, -1), ([1, 7, 7], (-1, -1, 1), -1)]
    assert verify_equal(best, drafts) == [(3, 4, 0), (1,), (7, 6)]
