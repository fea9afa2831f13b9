# Modules: specdec.kernels.triton.device.best_first
"""Best-first trees by a kernel equal those of the definition."""

import pytest
import torch

from specdec.sampling.row_ops import RowOps, TritonRowOps
from tests.specdec.trees import random_survival

TORCH, TRITON = RowOps(), TritonRowOps()


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_trees_are_those_of_the_definition(seed, has_ties):
    arguments = random_survival(seed, has_ties=has_ties)
    found, expected = TRITON.best_first(*arguments), TORCH.best_first(*arguments)
    for own, other in zip(found, expected, strict=True):
        assert torch.equal(own, other)
    assert expected.counts.sum() > 0
