"""Best-first trees by torch and by C++: their nodes, and the order of these."""

from itertools import product

import pytest
import torch

from specdec.kernels.cpu import native_library
from specdec.sampling.row_ops import CpuRowOps, RowOps
from specdec.types.drafts.draft_tree import BASE, depths, require_tree
from tests.specdec.trees import random_survival

OPS = [RowOps()] + [CpuRowOps()] * (native_library() is not None)


def grown(ops, probabilities, num_nodes):
    """Return the nodes of the tree of one row by the ranks on their paths, in order."""
    width = max(map(len, probabilities))
    rows = [[*own, *[0.0] * (width - len(own))] for own in probabilities]
    log_survival = torch.tensor([rows], dtype=torch.float64).log()
    trees = ops.best_first(log_survival, torch.tensor([num_nodes]), num_nodes)
    found = []
    for parent, rank in zip(trees.parents[0].tolist(), trees.ranks[0].tolist(), strict=True):
        found.append((*(found[parent] if parent != BASE else ()), rank))
    return found[: int(trees.counts[0])]


def by_the_rule(log_survival, num_nodes):
    """Return parents and ranks: again and again the first of all nodes that have a parent."""
    depth, num_children = log_survival.shape
    table, parents, ranks, values = log_survival.tolist(), [], [], []

    def rank_of(node):
        parent, rank = node
        level = 0 if parent == BASE else depths(parents)[parent]
        if level == depth or table[level][rank] == -torch.inf:
            return None
        is_chain = rank == 0 and parent == level - 1
        value = (0.0 if parent == BASE else values[parent]) + table[level][rank]
        return is_chain, value, -level, -parent, -rank

    while len(parents) < num_nodes:
        taken = set(zip(parents, ranks, strict=True))
        every = set(product(range(BASE, len(parents)), range(num_children))) - taken
        ranked = [(rank_of(node), node) for node in every if rank_of(node) is not None]
        if not ranked:
            break
        (_, value, *_), (parent, rank) = max(ranked)
        parents.append(parent)
        ranks.append(rank)
        values.append(value)
    return parents, ranks


@pytest.mark.parametrize("ops", OPS, ids=lambda ops: ops.name)
@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_the_nodes_are_those_of_the_rule(ops, has_ties, seed):
    log_survival, num_nodes, max_nodes = random_survival(seed, has_ties=has_ties)
    trees = ops.best_first(log_survival, num_nodes, max_nodes)
    for row, count in enumerate(trees.counts.tolist()):
        own = [column[row].tolist() for column in trees[1:]]
        parents, ranks = by_the_rule(log_survival[row], int(num_nodes[row]))
        assert (own[0][:count], own[2][:count]) == (parents, ranks)
        assert own[1][:count] == depths(parents)
        assert [set(column[count:]) <= {rest} for column, rest in zip(own, (-1, 0, 0), strict=True)]
        require_tree(parents)


@pytest.mark.parametrize("ops", OPS, ids=lambda ops: ops.name)
def test_the_chain_comes_first_and_then_the_most_likely_nodes(ops):
    probabilities = [[0.5, 0.4], [0.1, 0.05], [0.1]]
    chain = [(0,), (0, 0), (0, 0, 0)]
    assert grown(ops, probabilities, 2) == chain[:2]
    # 1: 0.4; under it 0: 0.04, 1: 0.02; 0, 1: 0.025
    assert grown(ops, probabilities, 7) == [*chain, (1,), (1, 0), (0, 1), (1, 1)]
    assert grown(ops, probabilities, 64)[-1] == (1, 1, 0)
    assert len(grown(ops, probabilities, 64)) == 2 + 4 + 4


@pytest.mark.parametrize("ops", OPS, ids=lambda ops: ops.name)
def test_of_equal_nodes_the_shallower_one_comes_first_and_then_the_lower_parent(ops):
    assert grown(ops, [[1.0, 1.0], [1.0, 1.0]], 9) == [
        *((0,), (0, 0)),
        *((1,), (0, 1), (1, 0), (1, 1)),
    ]


@pytest.mark.parametrize("ops", OPS, ids=lambda ops: ops.name)
def test_a_tree_ends_where_a_depth_has_no_token(ops):
    assert grown(ops, [[0.6, 0.4], [0.0], [0.9]], 9) == [(0,), (1,)]
    assert grown(ops, [[0.0], [0.9]], 9) == []
