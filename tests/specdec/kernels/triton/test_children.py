# Modules: specdec.kernels.triton.device.children
"""The best children by kernels equal those of the reference."""

import numpy as np
import pytest
import torch

from specdec.sampling.device.device_sampler import SamplingKind
from specdec.sampling.row_ops import RowOps, TritonRowOps
from tests.specdec.sampling.device.test_device_sampler import rows, rules_of

VOCAB = 2500
COUNT = 5


def check(logits, rules, count=COUNT):
    expected, found = (ops.children(logits, rules, count) for ops in (RowOps(), TritonRowOps()))
    is_child = expected.confidences > 0
    assert torch.equal(found.confidences > 0, is_child)
    assert torch.equal(found.token_ids[is_child], expected.token_ids[is_child])
    close = {"rtol": 2e-5, "atol": 1e-9}
    np.testing.assert_allclose(found.confidences, expected.confidences, **close)
    assert ((found.token_ids >= 0) & (found.token_ids < logits.shape[1])).all()


def logits_of(num_rows, dtype=torch.float32, vocab=VOCAB):
    generator = torch.Generator().manual_seed(7)
    return (3 * torch.randn(num_rows, vocab, generator=generator)).to(dtype)


def sampled(temperatures):
    """Return rules of these temperatures without limits."""
    _, batch = rows(len(temperatures))
    batch.params["temperature"] = temperatures
    batch.params["min_score"] = -torch.inf
    return rules_of(batch, SamplingKind.SAMPLED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", [SamplingKind.GREEDY, SamplingKind.SAMPLED])
def test_children_are_those_of_the_reference(kind, dtype):
    """Also of rows with equal scores, with faults, and of fewer tokens than children."""
    logits = logits_of(6, dtype)
    logits[1, [7, 2100, 3]] = 60.0
    logits[2, 9], logits[3, 2049], logits[4] = torch.nan, torch.inf, -torch.inf
    logits[5, 2:] = -torch.inf
    rules = sampled([0.8, 0.0, 0.7, 1.0, 0.9, 1.0])
    check(logits, None if kind is SamplingKind.GREEDY else rules)


@pytest.mark.slow
def test_truncated_tokens_are_no_children():
    _, batch = rows(6, seed=1)
    check(logits_of(6), rules_of(batch))


def test_more_children_than_are_weighed():
    logits, rules = logits_of(2, vocab=300), sampled([0.8, 0.0])
    check(logits, rules, 40)
    few, many = (TritonRowOps().children(logits, rules, count).confidences for count in (COUNT, 40))
    torch.testing.assert_close(few, many[:, :COUNT], rtol=1e-12, atol=0)
