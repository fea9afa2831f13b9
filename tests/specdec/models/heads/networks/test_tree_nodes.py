# Modules: specdec.models.heads.networks.base
"""Nodes of draft trees that a head with KV runs: each has the logits of the chain to it."""

import pytest
import torch

from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.config import HeadConfig
from specdec.models.heads.loading import load_head
from specdec.models.heads.networks.base import FrontierNodes
from specdec.types.drafts.draft_tree import BASE, paths
from tests.specdec.models.heads.driver import (
    KERNELS,
    Drafting,
    save,
    sequences,
    target_model,
)
from tests.specdec.models.heads.formats.test_eagle import CONFIG, eagle_weights
from tests.specdec.models.heads.networks.test_eagle3 import CONFIG as EAGLE3_CONFIG
from tests.specdec.models.heads.networks.test_eagle3 import eagle3_weights

LEVELS = [
    [(BASE, 5), (BASE, 6), (BASE, 7)],
    [(1, 8), (0, 9)],
    [(3, 10), (4, 11), (3, 12)],
]
"""Parent and token of the nodes that run on each level of one tree; another has fewer."""


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("config", "weights"), [(CONFIG, eagle_weights), (EAGLE3_CONFIG, eagle3_weights)]
)
@pytest.mark.parametrize("window", [None, 4])
def test_nodes_have_the_logits_of_chains(target_dir, tmp_path, config, weights, kernels, window):
    directory = save(tmp_path, config, weights())
    target = ModelConfig.from_directory(target_dir)
    head_config = HeadConfig.from_directory(directory, target, window)
    head = load_head(head_config, target_model(target_dir, kernels=kernels))
    assert head.capabilities.runs_nodes
    parts = sequences((11, 23))
    starts, ends = [1, 1], [len(part.tokens) for part in parts]
    trees = [LEVELS, [level[:1] for level in LEVELS[:2]]]
    trees[1][1] = [(0, 20)]
    drafting = Drafting(head, parts)
    found = run_levels(head, drafting.begin(starts, ends, 3), trees)
    for sequence, tree in enumerate(trees):
        nodes = [node for level in tree for node in level]
        for node, path in enumerate(paths([parent for parent, _ in nodes])):
            state = Drafting(head, parts).begin(starts, ends, 3)
            for index, place in enumerate(path):
                state = head.advance(state, [nodes[place][1]] * 2, index)
            expected = head.logits(state, len(path))[sequence]
            torch.testing.assert_close(found[sequence][node], expected, atol=1e-5, rtol=1e-5)
            if kernels == "native":
                assert torch.equal(found[sequence][node], expected)


def run_levels(head, state, trees):
    """Return the logits after each node of two trees, which share the passes."""
    logits = [[], []]
    rows = [{BASE: 0}, {BASE: 1}]
    for index in range(max(map(len, trees))):
        going = [each for each, tree in enumerate(trees) if index < len(tree)]
        frontiers, first = [], 0
        for each in going:
            nodes = [node for level in trees[each][: index + 1] for node in level]
            own, parents = trees[each][index], tuple(parent for parent, _ in nodes)
            frontiers.append(
                FrontierNodes(
                    [rows[each][parent] for parent, _ in own], [token for _, token in own], parents
                )
            )
        state = head.advance_nodes(state, frontiers)
        after = head.logits(state, index + 1)
        assert len(after) == sum(len(trees[each][index]) for each in going)
        for each in going:
            count, num_before = len(trees[each][index]), len(logits[each])
            rows[each] = {num_before + place: first + place for place in range(count)}
            logits[each] += after[first : first + count].clone()
            first += count
    return logits
