"""Trees that the device holds: in the form in which the host packs them."""

import random

import numpy as np
import pytest
import torch

from specdec.types.drafts.draft_tree import subtree
from specdec.types.messages import RowDrafting, StepRow
from specdec.worker.device.input.tree_input import (
    held_trees,
    num_tree_words,
    pack_trees,
    unpack_trees,
)
from specdec.worker.device.step_graphs import StepShape
from tests.specdec.trees import random_parents
from tests.specdec.worker.operators import assert_host_reads_nothing

MOST = 64


def held_of(trees):
    """Return the state of the device with trees."""
    held = torch.zeros(len(trees), 1 + 2 * MOST, dtype=torch.int64)
    for row, parents in zip(held, trees, strict=True):
        count = len(parents)
        row[0] = count
        row[1 : 1 + count] = torch.arange(100, 100 + count)
        row[1 + MOST : 1 + MOST + count] = torch.tensor(parents)
    return held


def packed_by_host(trees, shape):
    rows = [
        StepRow(
            0,
            5,
            tuple(range(99, 100 + len(each))),
            len(each),
            True,
            drafting=RowDrafting(parents=each or None),
        )
        for each in trees
    ]
    words = np.zeros(num_tree_words(shape), np.int64)
    pack_trees(words, rows, shape)
    return unpack_trees(torch.from_numpy(words), shape)


@pytest.mark.parametrize("query_len", [8, 1 + MOST, 80])
@pytest.mark.parametrize("seed", range(3))
def test_the_first_nodes_are_those_that_the_host_would_pack(query_len, seed):
    generator = random.Random(seed)
    counts = [generator.randrange(1, MOST + 1) for _ in range(6)]
    trees = [random_parents(generator, count) for count in counts]
    most = [min(generator.randrange(1, MOST + 1), query_len - 1) for _ in counts]
    shape = StepShape(len(trees), query_len, 3, has_trees=True)
    found = held_trees(held_of(trees), torch.tensor(most), shape)
    kept = [min(pair) for pair in zip(most, counts, strict=True)]
    assert found.num_nodes.tolist() == kept
    first = [subtree(tree, range(count)) for tree, count in zip(trees, kept, strict=True)]
    expected = packed_by_host(first, shape)
    for own, wanted in zip(found.trees, expected, strict=True):
        assert torch.equal(own, wanted)
    for tokens, count in zip(found.token_ids.tolist(), kept, strict=True):
        assert tokens == [*range(100, 100 + count), *[0] * (query_len - 1 - count)]


def test_the_host_reads_nothing():
    held, most = held_of([(-1, 0, 0)]), torch.tensor([2])
    shape = StepShape(1, 8, 3, has_trees=True)
    assert_host_reads_nothing(lambda: held_trees(held * 1, most, shape))
