"""Tests of trees of drafts: paths, walks and merged continuations."""

import random

import pytest

from specdec.types.drafts.draft_tree import (
    BASE,
    MAX_TREE_NODES,
    ancestors,
    depths,
    first_path,
    growth_width,
    is_chain,
    merged,
    nodes_within,
    num_growth_slots,
    path_of,
    paths,
    require_tree,
    signed_words,
    subtree,
    walk,
)
from tests.specdec.trees import random_parents

PARENTS = (-1, 0, -1, 1, 1, 2)
TOKENS = (5, 6, 7, 8, 9, 6)


def test_depths_and_paths_of_a_tree():
    assert depths(PARENTS) == [1, 2, 1, 3, 3, 2]
    assert paths(PARENTS) == [(0,), (0, 1), (2,), (0, 1, 3), (0, 1, 4), (2, 5)]
    assert ancestors(PARENTS) == [0b1, 0b11, 0b100, 0b1011, 0b10011, 0b100100]
    assert first_path(PARENTS) == [0, 1, 3]


@pytest.mark.parametrize("seed", range(10))
def test_ancestors_are_the_paths_as_bits(seed):
    parents = random_parents(random.Random(seed), 64)
    require_tree(parents)
    for node, (path, mask) in enumerate(zip(paths(parents), ancestors(parents), strict=True)):
        assert [each for each in range(64) if mask >> each & 1] == list(path)
        assert path[-1] == node
        assert len(path) == depths(parents)[node]
    words = signed_words(ancestors(parents))
    assert [word % 2**64 for word in words] == ancestors(parents)
    assert all(-(2**63) <= word < 2**63 for word in words)


def test_a_chain_is_no_tree():
    assert is_chain((-1, 0, 1))
    assert not is_chain((-1, -1))
    assert is_chain(())


@pytest.mark.parametrize("parents", [(0,), (-2,), (-1, 1), (-1,) * 65])
def test_parents_that_are_no_tree(parents):
    with pytest.raises(AssertionError):
        require_tree(parents)


def test_a_walk_follows_the_sampled_tokens():
    #         base, then each node
    sampled = [5, 6, 9, 0, 0, 1, 0]
    assert walk(sampled, TOKENS, PARENTS) == (5, 6, 9, 1)
    assert walk([7, 0, 0, 6, 0, 0, 3], TOKENS, PARENTS) == (7, 6, 3)
    assert walk([4] * 7, TOKENS, PARENTS) == (4,)
    assert path_of(TOKENS, PARENTS, (5, 6, 9, 1)) == [0, 1, 4]
    assert path_of(TOKENS, PARENTS, (7, 6)) == [2, 5]
    assert path_of(TOKENS, PARENTS, (6,)) == []


def test_a_walk_along_a_chain_is_its_longest_prefix():
    assert walk([1, 2, 3], (1, 2), (-1, 0)) == (1, 2, 3)
    assert walk([1, 9, 3], (1, 2), (-1, 0)) == (1, 9)


def test_continuations_merge_at_common_beginnings():
    tokens, parents = merged([[1, 2, 3], [1, 4], [5], [1, 2, 6]], 10)
    assert tokens == [1, 2, 3, 4, 5, 6]
    assert parents == [BASE, 0, 1, 0, BASE, 1]
    assert merged([[1, 2, 3], [4]], 2) == ([1, 2], [BASE, 0])
    assert merged([], 4) == ([], [])


def test_some_nodes_of_a_tree_are_a_tree():
    assert subtree(PARENTS, [0, 2, 5]) == (-1, -1, 1)


def test_the_nodes_within_a_depth():
    assert nodes_within(PARENTS, 2) == [0, 1, 2, 5]
    assert nodes_within(PARENTS, 9) == list(range(6))


def test_a_tree_grows_at_as_many_nodes_as_fit():
    assert [growth_width(*shape) for shape in ((16, 4), (12, 5), (60, 6), (4, 1))] == [4, 3, 10, 4]
    for depth in range(1, 33):
        for num_nodes in range(depth + 1, MAX_TREE_NODES + 1):
            assert growth_width(num_nodes, depth) >= 1
            assert num_growth_slots(num_nodes, depth) <= MAX_TREE_NODES
