"""Tests of draft trees of a fixed shape."""

import pytest

from specdec.types.drafts.static_tree import StaticTree
from specdec.types.errors import InvalidValueError


def test_choices_are_ordered_by_depth_and_rank():
    tree = StaticTree.of_choices([[0, 0], [1], [0], [2], [0, 1], [1, 0], [0, 0, 0]])
    assert tree.parents == (-1, -1, -1, 0, 0, 1, 3)
    assert tree.ranks == (0, 1, 2, 0, 1, 0, 0)


@pytest.mark.parametrize(
    "choices", [[[0], [0]], [[0, 1]], [[0], [-1]], [[]], [[i] for i in range(65)]]
)
def test_choices_that_are_no_tree_are_refused(choices):
    with pytest.raises(InvalidValueError, match="medusa_choices is"):
        StaticTree.of_choices(choices, "medusa_choices")


def test_a_shape_is_cut_to_the_levels_and_ranks_that_exist():
    tree = StaticTree.of_choices([[0], [1], [2], [0, 0], [0, 1], [2, 0], [0, 1, 0]])
    whole = tree.within([3, 2, 1], 9)
    assert whole == tree
    assert whole.token_ids([[7, 8, 9], [4, 5], [6]]) == (7, 8, 9, 4, 5, 4, 6)
    assert tree.within([2, 2], 9) == StaticTree((-1, -1, 0, 0), (0, 1, 0, 1))
    assert tree.within([3, 2, 1], 4) == StaticTree((-1, -1, -1, 0), (0, 1, 2, 0))
    assert tree.within([], 4) == StaticTree((), ())
