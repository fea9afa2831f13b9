"""The layout of batches, and the order of the samples."""

import numpy as np
import pytest
import torch

from specdec.training.data.batches import Batch, BatchOrder
from specdec.training.data.corpus import Sample

FIRST = Sample((1, 2, 3, 4, 5), num_prompt_tokens=2, temperature=0.0)
SECOND = Sample((6, 7, 8), num_prompt_tokens=1, temperature=0.7)
LONG = Sample(tuple(range(20, 30)), num_prompt_tokens=1, temperature=0.3)
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
    after = torch.stack([batch.next_ids[batch.after(index)] for index in range(2)])
    assert after[exists].tolist() == [4, 5, 8, 5]


def test_a_sample_may_have_no_base():
    batch = Batch.of([NO_BASE, FIRST])
    assert batch.token_ids[batch.bases].tolist() == [3, 4]
    assert batch.spans[0].num_bases == 0


def test_bases_are_drawn_from_each_sample():
    whole = Batch.of([FIRST, NO_BASE, LONG, SECOND])
    drawn = whole.with_bases(2, np.random.default_rng(3))
    assert [span.num_bases for span in drawn.spans] == [2, 0, 2, 1]
    assert [span.tokens for span in drawn.spans] == [span.tokens for span in whole.spans]
    assert set(drawn.bases.tolist()) < set(whole.bases.tolist())
    rows = [whole.bases.tolist().index(place) for place in drawn.bases.tolist()]
    assert rows == sorted(rows)
    assert torch.equal(drawn.temperatures, whole.temperatures[rows])
    assert torch.equal(drawn.exists(3), whole.exists(3)[:, rows])
    assert torch.equal(drawn.places(3), whole.places(3)[:, rows])


def test_bases_are_drawn_equally_often():
    whole, generator, count = Batch.of([LONG]), np.random.default_rng(5), 400
    drawn = [whole.with_bases(2, generator).bases for _ in range(count)]
    found = torch.bincount(torch.cat(drawn), minlength=whole.num_tokens)[whole.bases]
    # Each is a binomial variable with p = 2 / 8: 6 standard deviations have odds of 1 : 1e8.
    assert (found - count / 4).abs().max() < 6 * (count * 0.25 * 0.75) ** 0.5


def test_few_bases_are_all_used():
    whole = Batch.of([FIRST, SECOND])
    assert whole.with_bases(2, np.random.default_rng(0)) is whole


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
