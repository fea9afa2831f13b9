"""Trees whose children depend on the path: their nodes, and the order of these."""

import numpy as np
import pytest
import torch

from specdec.kernels.cpu import native_library
from specdec.sampling.row_ops import CpuRowOps, RowOps
from specdec.types.drafts.draft_tree import paths
from specdec.worker.head.path_tree import PathTrees
from specdec.worker.head.sampler import PartialDraft
from tests.specdec.trees import random_survival

OPS = [RowOps()] + [CpuRowOps()] * (native_library() is not None)


def grow(drafts, children_of):
    """Grow the trees of drafts. children_of: of a sequence and a path."""
    trees = PathTrees(drafts)
    while trees.num_rows:
        found = [children_of(end.seq_id, tuple(end.token_ids)) for end in trees.ends()]
        trees.add_level(*(np.stack(column) for column in zip(*found, strict=True)))
    trees.finish()


def grown(num_nodes, depth, children_of):
    """Return the draft whose nodes have these children. children_of: of a path."""
    draft = PartialDraft(0, 9, num_nodes, depth)
    grow([draft], lambda _, path: children_of(path))
    draft.parents = draft.parents or tuple(range(-1, len(draft.token_ids) - 1))
    return draft


@pytest.mark.parametrize("ops", OPS, ids=lambda ops: ops.name)
@pytest.mark.parametrize("has_ties", [False, True])
def test_where_depths_decide_the_nodes_are_those_of_best_first(ops, has_ties):
    """Unless one of these has a parent in the other half."""
    num_equal = 0
    for seed in range(24):
        survival, _, _ = random_survival(seed, has_ties=has_ties, num_rows=1)
        _, depth, num_children = survival.shape
        confidences = survival[0].exp().numpy()
        with np.errstate(divide="ignore"):
            survival = torch.from_numpy(np.log(confidences))[None]
        count = depth + num_children - 1
        trees = ops.best_first(survival, torch.tensor([count]), count)
        num_nodes = int(trees.counts[0])
        parents, ranks = (column[0, :num_nodes].tolist() for column in (trees.parents, trees.ranks))
        if max(parents, default=-1) >= max(count // 2, depth):
            continue
        by_depth = [(np.arange(num_children), each) for each in confidences]
        draft = grown(count, depth, lambda path, levels=by_depth: levels[len(path)])
        assert (draft.token_ids, draft.parents) == (ranks, tuple(parents))
        num_equal += 1
    assert num_equal > 12


def test_the_chain_comes_first_and_then_the_best_of_what_was_found():
    generator = np.random.default_rng(1)
    found = {}

    def children_of(path):
        weights = np.sort(generator.dirichlet(np.full(12, 0.3)))[::-1]
        found[path] = generator.permutation(50)[:12].tolist(), np.log(weights).tolist()
        return np.array(found[path][0]), weights

    draft = grown(12, 3, children_of)
    texts = [tuple(draft.token_ids[node] for node in path) for path in paths(draft.parents)]
    survival = {(): 0.0}
    for path in sorted(found, key=len):
        for token, value in zip(*found[path], strict=True):
            survival[*path, token] = survival[path] + value
    del survival[()]
    chain = []
    for _ in range(3):
        chain.append(found[tuple(chain)][0][0])
    assert texts[:3] == [tuple(chain[: 1 + index]) for index in range(3)]
    rest = sorted(survival.keys() - set(texts[:3]), key=survival.__getitem__, reverse=True)
    assert texts[3:] == rest[:9]
    assert len(found) <= 1 + 2 * 6


def test_a_tree_ends_where_a_path_has_no_child():
    tokens, some = np.arange(3), np.array([0.6, 0.3, 0.0])
    draft = grown(6, 2, lambda path: (tokens, some * (path != (0,))))
    assert (draft.token_ids, draft.parents) == ([0, 1, 0, 1], (-1, -1, 1, 1))


@pytest.mark.parametrize("has_ties", [False, True])
def test_trees_of_several_sizes_grow_as_alone(has_ties):
    generator, found = np.random.default_rng(2), {}

    def children_of(seq_id, path):
        if (seq_id, path) not in found:
            weights = np.sort(generator.dirichlet(np.full(40, 0.3)))[::-1]
            if has_ties:
                weights = 2.0 ** -np.sort(generator.integers(1, 9, 40))
            found[seq_id, path] = generator.permutation(50)[:40], weights
        return found[seq_id, path]

    sizes = [(32, 4), (7, 7), (40, 2), (1, 1), (40, 5)]
    together, alone = ([PartialDraft(i, 9, *each) for i, each in enumerate(sizes)] for _ in "ab")
    grow(together, children_of)
    for draft in alone:
        grow([draft], children_of)
    assert [len(draft.token_ids) for draft in alone] == [32, 7, 40, 1, 40]
    for draft, other in zip(together, alone, strict=True):
        assert (draft.token_ids, draft.parents) == (other.token_ids, other.parents)
