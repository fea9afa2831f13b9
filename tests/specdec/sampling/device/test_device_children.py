"""The best children in fixed shapes: those of the host, and no value that it reads."""

import numpy as np
import pytest
import torch

from specdec.sampling.device.device_sampler import SamplingKind
from specdec.sampling.sampler import sample_on_device
from specdec.sampling.top_children import best_children_of
from tests.specdec.fakes import run_ranks
from tests.specdec.sampling.device.test_device_sampler import ALONE, VOCAB, rows, rules_of, shards
from tests.specdec.worker.operators import assert_host_reads_nothing

COUNT = 6


def on_host(logits, batch, count=COUNT):
    """Return tokens and confidences of the rows, which the host may read."""
    found = best_children_of(logits, batch, count, shards(ALONE)[1], on_host=True)
    return found.token_ids.numpy(), found.confidences.numpy()


def same_children(found, expected):
    tokens, confidences = expected
    is_child = confidences > 0
    assert (found.confidences.numpy() > 0).tolist() == is_child.tolist()
    assert found.token_ids.numpy()[is_child].tolist() == tokens[is_child].tolist()
    np.testing.assert_allclose(found.confidences.numpy(), confidences, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("seed", range(2))
def test_the_children_are_those_of_the_host(size, seed):
    """Rows with and without temperature and truncation; each rank ranks a part of them."""
    logits, batch = rows(20, seed)

    def on_rank(group):
        own, shard = shards(group)
        rules = rules_of(batch)
        found = best_children_of(logits[:, own], rules, COUNT, shard)
        sampled = sample_on_device(logits[:, own], rules, shard)
        assert torch.equal(found.token_ids[:, 0], sampled.token_ids)
        return found

    for found in run_ranks(size, on_rank):
        same_children(found, on_host(logits, batch))


def test_greedy_rows_need_no_rules():
    logits, _ = rows(6)
    found = best_children_of(logits, None, COUNT, shards(ALONE)[1])
    same_children(found, on_host(logits, None))


@pytest.mark.parametrize("kind", [SamplingKind.GREEDY, SamplingKind.SAMPLED])
def test_of_equal_tokens_the_lower_comes_first_and_faults_have_none(kind):
    logits = torch.zeros(4, VOCAB)
    logits[0, [9, 3, 70]] = 2.0
    logits[1, 7], logits[2, 5], logits[3] = torch.nan, torch.inf, -torch.inf
    rules = None
    if kind is SamplingKind.SAMPLED:
        _, batch = rows(4)
        batch.params["temperature"] = 0
        rules = rules_of(batch, kind)
    found = best_children_of(logits, rules, COUNT, shards(ALONE)[1])
    assert found.token_ids[0].tolist() == [3, 9, 70, 0, 1, 2]
    assert found.confidences[0].min() > 0
    assert (found.confidences[1:] == 0).all()
    assert ((found.token_ids >= 0) & (found.token_ids < VOCAB)).all()


@pytest.mark.parametrize("kind", SamplingKind)
def test_the_host_reads_nothing(kind):
    logits, batch = rows(3)
    rules, shard = rules_of(batch, kind), shards(ALONE)[1]
    assert_host_reads_nothing(lambda: best_children_of(logits * 1, rules, COUNT, shard))
