"""Tests of static and dynamic draft trees, and of the ranking of children with shared noise."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.sampling.gumbel import CHUNK_TOKENS, gumbel_noise
from specdec.sampling.sampler import sample
from specdec.sampling.tree_growth import (
    Children,
    DynamicTree,
    StaticTree,
    best_children,
    best_nodes,
    fitted_choices,
)
from specdec.types.draft_tree import depths, paths, require_tree
from specdec.types.errors import InvalidValueError
from tests.specdec.sampling.verifiers.trials import random_logits, sampling_batch, shard_of

RATES = ((0.6, 0.2, 0.1), (0.5, 0.2), (0.4,))


def test_choices_are_ordered_by_depth_and_rank():
    tree = StaticTree.of_choices([[0, 0], [1], [0], [2], [0, 1], [1, 0], [0, 0, 0]])
    assert tree.parents == (-1, -1, -1, 0, 0, 1, 3)
    assert tree.ranks == (0, 1, 2, 0, 1, 0, 0)


@pytest.mark.parametrize("choices", [[[0], [0]], [[0, 1]], [[0], [-1]], [[i] for i in range(65)]])
def test_choices_that_are_no_tree_are_refused(choices):
    with pytest.raises(InvalidValueError, match="tree choice"):
        StaticTree.of_choices(choices)


def rate_of(choice):
    return np.prod([RATES[depth][rank] for depth, rank in enumerate(choice)])


@pytest.mark.parametrize("num_nodes", [1, 4, 9, 100])
def test_fitted_choices_have_the_highest_rates_and_are_a_tree(num_nodes):
    every = [
        choice
        for depth in (1, 2, 3)
        for choice in product(*(range(len(ranks)) for ranks in RATES[:depth]))
    ]
    fitted = fitted_choices(RATES, num_nodes)
    best = sorted(map(rate_of, every), reverse=True)[:num_nodes]
    assert [rate_of(choice) for choice in fitted] == pytest.approx(best)
    assert len(StaticTree.of_choices(fitted).parents) == min(num_nodes, len(every))


def test_children_are_the_best_tokens_with_their_probabilities():
    scores = np.log(np.array([[0.1, 0.6, 0.3], [0.4, 0.2, 0.4]]))
    children = best_children(scores, 2)
    assert children.token_ids.tolist() == [[1, 2], [0, 2]]
    np.testing.assert_allclose(children.confidences, [[0.6, 0.3], [0.4, 0.4]])
    sharper = best_children(scores, 2, tau=0.5).confidences
    assert sharper[0][0] > 0.6


def test_a_hand_worked_dynamic_tree():
    tree = DynamicTree()
    level = Children(np.array([[7, 8, 9]]), np.array([[0.6, 0.3, 0.05]]))
    assert [tree.token_of(node) for node in tree.grow(level, 2)] == [7, 8]
    level = Children(np.array([[1, 2], [3, 4]]), np.array([[0.3, 0.2], [0.9, 0.05]]))
    assert [tree.token_of(node) for node in tree.grow(level, 2)] == [3, 1]
    # values: 7 0.6, 8 0.3, 9 0.05; under 7: 1 0.18, 2 0.12; under 8: 3 0.27, 4 0.015
    assert tree.best(4) == ((7, 8, 1, 3), (-1, -1, 0, 1))
    assert tree.best(2) == ((7, 8), (-1, -1))


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 64))
def test_the_best_nodes_are_a_tree_of_the_highest_values(seed, width, num_nodes):
    generator, tree = np.random.default_rng(seed), DynamicTree()
    for _ in range(4):
        scores = generator.normal(size=(len(tree.frontier), 9))
        tree.grow(best_children(scores, width), width)
    tokens, parents = tree.best(num_nodes)
    require_tree(parents)
    assert len(tokens) == len(parents) == min(num_nodes, width + 3 * width * width)
    assert max(depths(parents)) <= 4
    assert len({tuple(tokens[i] for i in path) for path in paths(parents)}) == len(tokens)


def test_of_equal_values_the_first_are_kept():
    assert best_nodes([0.5, 0.2, 0.5, 0.2], 3) == [0, 1, 2]


VOCAB_SIZE = 64
NUM_TRIALS = 4000


@pytest.mark.parametrize(
    ("count", "plain", "noise"), [(1, 0.175, 0.587), (2, 0.564, 0.879), (4, 0.766, 0.986)]
)
def test_children_ranked_with_the_noise_are_accepted_more_often(count, plain, noise):
    """At temperature 0.8, with a draft that is close to the target."""
    assert VOCAB_SIZE <= CHUNK_TOKENS
    target = random_logits(1, VOCAB_SIZE, spread=2.0, seed=1)
    draft = target + random_logits(1, VOCAB_SIZE, spread=0.7, seed=2)
    seeds = torch.arange(NUM_TRIALS)
    batch = sampling_batch(0.8, seeds, torch.zeros_like(seeds))
    right = sample(target.expand(NUM_TRIALS, -1), batch, shard_of(VOCAB_SIZE)).numpy()
    gumbel = gumbel_noise(batch.noise_keys, torch.zeros_like(seeds))[:, :VOCAB_SIZE].numpy()
    log_q = (draft / 0.8).log_softmax(-1).double().numpy().repeat(NUM_TRIALS, axis=0)
    rates = {}
    for name, scores in (("noise", log_q + gumbel), ("plain", log_q)):
        children = best_children(scores, count).token_ids
        rates[name] = float((children == right[:, None]).any(1).mean())
    assert rates == pytest.approx({"noise": noise, "plain": plain}, abs=0.001)
