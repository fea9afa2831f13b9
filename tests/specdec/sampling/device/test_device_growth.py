"""Trees that grow on the device: those of DynamicTree, whatever else grows beside them."""

import numpy as np
import pytest
import torch

from specdec.sampling.device.device_children import DeviceChildren
from specdec.sampling.device.device_growth import (
    DepthChildren,
    GrowthShape,
    TreeGrowth,
    WantedTrees,
    growth_widths,
)
from specdec.types.drafts.draft_tree import chain_of, growth_width
from tests.specdec.dynamic_tree import Children, DynamicTree
from tests.specdec.worker.operators import assert_host_reads_nothing

SHAPES = [
    GrowthShape.of(24, 5),
    GrowthShape.of(7, 3),
    GrowthShape.of(60, 4),
    GrowthShape.of(64, 40),
]


def wanted_of(sizes):
    num_nodes, depths = torch.tensor(sizes).unbind(1)
    return WantedTrees(num_nodes, depths, growth_widths(num_nodes, depths))


class RandomChildren:
    """Children of nodes by the tokens on their path; some are missing, and some paths end."""

    def __init__(self, width, seed):
        self.width, self.seed = width, seed

    def of(self, row, path):
        generator = np.random.default_rng([self.seed, row, *path])
        confidences = np.sort(generator.dirichlet(np.full(self.width + 1, 0.5))[:-1])[::-1]
        num_present = self.width if generator.random() < 0.7 else generator.integers(self.width + 1)
        is_present = np.arange(self.width) < num_present
        return generator.permutation(90)[: self.width], np.where(is_present, confidences, 0)


def grown_on_host(children, row, num_nodes, depth, width):
    tree, level = DynamicTree(), 0
    while tree.frontier and level < depth:
        found = [children.of(row, tree.path_of(node)) for node in tree.frontier]
        tree.grow(Children(*map(np.array, zip(*found, strict=True))), width)
        level += 1
    return tree.best(num_nodes)


def grown_on_device(children, shape, wanted):
    """Return the growth of trees whose frontier is followed by its tokens."""
    growth, num_rows = TreeGrowth(shape, wanted), len(wanted.depths)
    paths = [[()] for _ in range(num_rows)]
    for _ in range(shape.depth):
        found = [children.of(row, path) for row in range(num_rows) for path in paths[row]]
        tokens, confidences = (torch.tensor(np.array(each)) for each in zip(*found, strict=True))
        frontier = growth.add_level(DeviceChildren(tokens, confidences))
        paths = [
            [(*paths[row][parent], token) for parent, token in zip(parents, tokens, strict=True)]
            for row, (parents, tokens) in enumerate(
                zip(frontier.parent_places.tolist(), frontier.token_ids.tolist(), strict=True)
            )
        ]
    return growth


@pytest.mark.parametrize("shape", SHAPES)
def test_the_trees_are_those_of_the_definition(shape):
    """Trees of several sizes, chains, and rows without a draft grow beside each other."""
    num_nodes, depth, _ = shape
    sizes = [
        shape[:2],
        (num_nodes - 1, depth),
        (depth, depth),
        (0, 0),
        (depth - 1, depth - 1),
        (1, 1),
    ]
    for seed in range(4):
        children = RandomChildren(shape.width, seed)
        growth = grown_on_device(children, shape, wanted_of(sizes))
        trees, chains = growth.best(), growth.chains()
        for row, (count, own_depth) in enumerate(sizes):
            width = growth_width(count, own_depth) if own_depth else 1
            tokens, parents = grown_on_host(children, row, count, own_depth, width)
            assert trees.counts[row] == len(tokens) <= count
            assert tuple(trees.token_ids[row, : len(tokens)].tolist()) == tokens
            assert tuple(trees.parents[row, : len(tokens)].tolist()) == parents
            chain = chains.token_ids[row, : chains.counts[row]].tolist()
            assert tuple(chain) == chain_of(tokens, parents)
            assert (trees.token_ids[row, len(tokens) :] == 0).all()
            assert (trees.parents[row, len(tokens) :] == -1).all()


class UnlikelyChildren(RandomChildren):
    """Two children of each node, of which the product of confidences on most paths underflows."""

    def of(self, row, path):
        return np.arange(self.width) + 10 * len(path), np.array([1e-180, 1e-200] + [0.0] * 2)


def test_a_node_with_a_tiny_value_is_a_node():
    shape = GrowthShape.of(12, 3)
    children = UnlikelyChildren(shape.width, 0)
    trees = grown_on_device(children, shape, wanted_of([shape[:2]])).best()
    tokens, parents = grown_on_host(children, 0, *shape)
    assert trees.counts.tolist() == [len(tokens)] == [12]
    assert tuple(trees.token_ids[0].tolist()) == tokens
    assert tuple(trees.parents[0].tolist()) == parents


def test_widths_are_those_of_the_host():
    sizes = [(count, depth) for count in range(1, 65) for depth in range(1, count + 1)]
    assert wanted_of(sizes).widths.tolist() == [growth_width(*size) for size in sizes]


@pytest.mark.parametrize(
    ("size", "is_held"),
    [
        *(((24, 5), True), ((25, 5), False), ((24, 4), False), ((24, 6), False)),
        *(((5, 0), True), ((6, 0), False), ((4, 6), True), ((0, 0), True)),
    ],
)
def test_a_shape_holds_trees_up_to_its_width_and_depth(size, is_held):
    assert GrowthShape.of(24, 5).holds(*size) == is_held


@pytest.mark.parametrize(
    ("size", "is_held"),
    [
        *(((24, 5), True), ((25, 5), False), ((24, 4), False), ((23, 4), True), ((24, 6), False)),
        *(((5, 0), True), ((6, 0), False), ((4, 6), True), ((6, 6), False), ((0, 0), True)),
    ],
)
def test_a_shape_holds_best_first_trees_up_to_its_ranks_and_depth(size, is_held):
    assert GrowthShape.of(24, 5).holds_best_first(*size) == is_held


def test_children_of_a_tree_do_not_depend_on_others():
    """One with as many nodes as its depth has one child at each; more nodes may all be siblings."""
    children = DepthChildren(torch.zeros(3, 4, 5).long(), torch.ones(3, 4, 5).double())
    within = children.within(torch.tensor([3, 6, 0]), torch.tensor([3, 4, 0])).confidences > 0
    assert within.sum(2).tolist() == [[1, 1, 1, 0], [3, 3, 3, 3], [0, 0, 0, 0]]


def test_the_host_reads_nothing():
    shape, wanted = GrowthShape.of(7, 3), wanted_of([(7, 3), (3, 3)])

    def grow():
        growth = TreeGrowth(shape, wanted)
        for num_parents in (1, 3, 3):
            size = (2 * num_parents, shape.width)
            tokens = torch.ones(size, dtype=torch.int64)
            growth.add_level(DeviceChildren(tokens, torch.rand(size, dtype=torch.float64)))
        growth.best()
        growth.chains()

    assert_host_reads_nothing(grow)
