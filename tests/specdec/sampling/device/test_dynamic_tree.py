# Modules: specdec.sampling.device.device_growth
"""Tests of DynamicTree, the oracle of trees that grow on the device."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specdec.types.drafts.draft_tree import depths, paths, require_tree
from tests.specdec.dynamic_tree import Children, DynamicTree
from tests.specdec.trees import best_children


def test_a_hand_worked_dynamic_tree():
    tree = DynamicTree()
    level = Children(np.array([[7, 8, 9]]), np.array([[0.6, 0.3, 0.05]]))
    assert [tree.token_of(node) for node in tree.grow(level, 2)] == [7, 8]
    level = Children(np.array([[1, 2], [3, 4]]), np.array([[0.3, 0.2], [0.9, 0.05]]))
    assert [tree.token_of(node) for node in tree.grow(level, 2)] == [3, 1]
    # values: 7 0.6, 8 0.3, 9 0.05; under 7: 1 0.18, 2 0.12; under 8: 3 0.27, 4 0.015
    assert tree.best(4) == ((7, 8, 1, 3), (-1, -1, 0, 1))
    assert tree.best(3) == ((7, 8, 1), (-1, -1, 0)), "the chain 7, 1 before 3"
    assert tree.best(2) == ((7, 1), (-1, 0))


def test_children_without_confidence_do_not_exist():
    tree = DynamicTree()
    tree.grow(Children(np.array([[7, 8]]), np.array([[0.6, 0.3]])), 2)
    children = Children(np.array([[1, 2], [3, 4]]), np.array([[0.0, 0.0], [0.9, 0.0]]))
    [node] = tree.grow(children, 2)
    assert tree.path_of(node) == [8, 3]
    assert tree.best(9) == ((7, 8, 3), (-1, -1, 1))
    assert tree.grow(Children.none(1, 2), 2) == []


def test_the_frontier_holds_the_end_of_the_chain():
    tree = DynamicTree()
    tree.grow(Children(np.array([[7, 8]]), np.array([[0.5, 0.4]])), 2)
    level = Children(np.array([[1, 2], [3, 4]]), np.array([[0.1, 0.1], [0.5, 0.3]]))
    frontier = tree.grow(level, 2)
    assert [tree.token_of(node) for node in frontier] == [3, 1]


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(4, 64))
def test_the_best_nodes_are_a_tree_with_the_chain_of_best_children(seed, width, num_nodes):
    generator, tree, chain = np.random.default_rng(seed), DynamicTree(), []
    for _ in range(4):
        scores = generator.normal(size=(len(tree.frontier), 9))
        children = best_children(scores, width)
        end = next(row for row, node in enumerate(tree.frontier) if tree.path_of(node) == chain)
        chain.append(int(children.token_ids[end, 0]))
        tree.grow(children, width)
    tokens, parents = tree.best(num_nodes)
    require_tree(parents)
    assert len(tokens) == len(parents) == min(num_nodes, width + 3 * width * width)
    assert max(depths(parents)) == 4
    found = {tuple(tokens[i] for i in path) for path in paths(parents)}
    assert len(found) == len(tokens)
    assert tuple(chain) in found
