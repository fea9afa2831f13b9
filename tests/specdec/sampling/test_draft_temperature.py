"""The temperature of a head's drafts: on the host and on the device, and what it is for."""

import pytest
import torch

from specdec.sampling.draft_temperature import (
    HEAD_DRAFT_TEMPERATURE,
    draft_batch_of,
    draft_rules_of,
)
from specdec.sampling.sampler import sample, sample_on_device
from tests.specdec.sampling.verifiers.trials import random_logits, sampling_batch, shard_of

NUM_ROWS, VOCAB_SIZE = 64, 300


@pytest.fixture
def batch():
    seeds = torch.arange(NUM_ROWS)
    return sampling_batch(0.8, seeds, torch.zeros_like(seeds))


def test_a_draft_of_flatter_logits_is_what_the_target_samples(batch):
    target = random_logits(NUM_ROWS, VOCAB_SIZE, spread=3.0, seed=1)
    draft, shard = target * HEAD_DRAFT_TEMPERATURE, shard_of(VOCAB_SIZE)
    expected = sample(target, batch, shard).tolist()
    assert sample(draft, draft_batch_of(batch), shard).tolist() == expected
    plain = sample(draft, batch, shard).tolist()
    assert sum(a == b for a, b in zip(plain, expected, strict=True)) < NUM_ROWS


def test_the_device_drafts_what_the_host_does(batch):
    logits, shard = random_logits(NUM_ROWS, VOCAB_SIZE, spread=3.0, seed=2), shard_of(VOCAB_SIZE)
    rules = draft_rules_of(batch.rules)
    assert torch.equal(rules.temperatures, draft_batch_of(batch).rules.temperatures)
    found = sample_on_device(logits, rules, shard)
    assert found.token_ids.tolist() == sample(logits, draft_batch_of(batch), shard).tolist()


def test_greedy_rows_stay_greedy(batch):
    batch.params["temperature"][::2] = 0
    assert (draft_batch_of(batch).params["temperature"][::2] == 0).all()
