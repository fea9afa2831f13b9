# Modules: specdec.training.data.whole_samples
"""Padded rows, which a GPU attends in, compute what samples compute one by one."""

import numpy as np
import pytest
import torch

from specdec.training.data import padding
from specdec.training.data.batches import Batch
from specdec.training.data.config import TrainingConfig
from specdec.training.data.corpus import Sample
from specdec.training.data.target import Target
from specdec.training.data.whole_samples import use_whole_samples
from specdec.training.drafters import blocks, draft_model, eagle3
from specdec.training.drafters.base import drafter_class

CONFIG = TrainingConfig(depth=3, num_layers=None)
DRAFTED = torch.arange(0, 320, 2)
LENGTHS = ((2, 9), (1, 2), (30, 90), (3, 17), (5, 6), (70, 75), (1, 40))
"""Tokens of prompts and of whole samples; the second and the fifth have no base."""


@pytest.fixture
def batch():
    draw = np.random.default_rng(0)
    texts = [(tuple(draw.integers(0, 320, length)), prompt) for prompt, length in LENGTHS]
    return Batch.of([Sample(text, prompt, 0.0) for text, prompt in texts])


def outcome(method, target, batch):
    """Return the states of the drafts that exist, and the gradients of a function of them."""
    torch.manual_seed(0)
    drafter = drafter_class(method)(target, DRAFTED, CONFIG)
    hidden = target.hidden_states(batch, drafter.taps)
    states = drafter.states(batch, hidden)[batch.exists(CONFIG.depth)]
    (states * torch.linspace(-1, 1, states.numel()).view_as(states)).sum().backward()
    gradients = {
        name: each.grad for name, each in drafter.named_parameters() if each.grad is not None
    }
    return states.detach(), gradients


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("method", ["eagle3", "dspark", "draft_model"])
def test_padded_rows_have_the_states_and_gradients_of_samples(
    method, is_split, target, batch, monkeypatch
):
    expected, gradients = outcome(method, target, batch)
    for module in (blocks, draft_model, eagle3):
        monkeypatch.setattr(module, "is_padded", lambda _: True)
    if is_split:  # samples into several rows, and groups of rows into several calls
        monkeypatch.setattr(eagle3, "_ROW_BASES", 8)
        monkeypatch.setattr(blocks, "_ROW_BASES", 8)
        monkeypatch.setattr(padding, "_MAX_MASK_ELEMENTS", 3000)
    found, own = outcome(method, target, batch)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert own.keys() == gradients.keys()
    for name, each in gradients.items():
        torch.testing.assert_close(own[name], each, rtol=1e-3, atol=1e-3 * each.abs().max())


def test_rows_of_a_class_are_padded_by_little(batch):
    """Every base has one place in the rows, and no row of a mask is empty."""
    rows = padding.PaddedBases.of(batch, max_bases=16, num_own=3)
    assert len(rows.groups) > 1
    places = torch.cat([group.bases.flatten() for group in rows.groups])[rows.order]
    assert places.equal(torch.arange(batch.num_bases))
    for group in rows.groups:
        assert (group.is_before | group.is_own).any(-1).all()
        assert group.tokens.shape[1] % 8 == group.num_bases % 8 == 0


def test_a_target_computes_whole_samples_without_a_cache(target, batch):
    expected = target.hidden_states(batch, (1, 2))
    whole = Target(target.directory, 128, target.precision)
    assert use_whole_samples(whole.decoder)
    whole._kv_cache = whole.decoder.new_kv_cache(0)
    whole._num_slots = batch.num_tokens * 16  # no cache is made
    found = whole.hidden_states(batch, (1, 2))
    assert whole._kv_cache.numel() == 0
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
