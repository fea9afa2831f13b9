"""The layout of batches, and the order of the samples."""

import pytest
import torch

from specdec.training.batches import Batch, BatchOrder
from specdec.training.corpus import Sample

FIRST = Sample((1, 2, 3, 4, 5), num_prompt_tokens=2, temperature=0.0)
SECOND = Sample((6, 7, 8), num_prompt_tokens=1, temperature=0.7)
NO_BASE = Sample((9, 10), num_prompt_tokens=1, temperature=1.0)


def test_samples_lie_one_after_the_other():
    batch = Batch.of([FIRST, SECOND])
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 6, 7]
    assert batch.next_ids.tolist() == [2, 3, 4, 5, 7, 8]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert batch.token_ids[batch.bases].tolist() == [3, 4, 7]
    assert batch.temperatures.tolist() == pytest.approx([0.0, 0.0, 0.7])


def test_drafts_end_with_their_sample():
    batch = Batch.of([FIRST, SECOND])
    assert batch.exists(3).tolist() == [
        [True, True, True],
        [True, False, False],
        [False, False, False],
    ]
    exists = batch.exists(2)
    behind = torch.stack([batch.next_ids[batch.behind(index)] for index in range(2)])
    assert behind[exists].tolist() == [4, 5, 8, 5]


def test_a_sample_may_have_no_base():
    batch = Batch.of([NO_BASE, FIRST])
    assert batch.token_ids[batch.bases].tolist() == [3, 4]
    assert batch.spans[0].num_bases == 0


def test_every_epoch_has_every_sample_once_in_another_order():
    lengths = [5, 9, 3, 20, 7, 8]
    order = BatchOrder(lengths, num_epochs=2, batch_tokens=16, seed=1)
    flat = [index for step in range(len(order)) for index in order[step]]
    first, second = flat[:6], flat[6:]
    assert sorted(first) == sorted(second) == list(range(6))
    assert first != second
    for step in range(len(order)):
        members = order[step]
        assert len(members) == 1 or sum(lengths[index] for index in members) <= 16


def test_the_order_depends_on_the_seed_alone():
    orders = [
        list(BatchOrder([4] * 20, num_epochs=1, batch_tokens=8, seed=seed)) for seed in (1, 1, 2)
    ]
    assert orders[0] == orders[1] != orders[2]
