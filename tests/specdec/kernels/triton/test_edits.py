# Modules: specdec.kernels.triton.device.edits
"""Penalties and token masks of rows of logits: the bits of the reference."""

import pytest
import torch

from specdec.kernels.reference.logit_edits import PROMPT_TOKEN, Change, LogitEdits
from specdec.kernels.triton.edits import edit_rows
from specdec.sampling.device import device_edits

NUM_ROWS, VOCAB, NUM_PLACES, NUM_DRAFTS = 7, 2500, 3, 3


def edits(generator, first_token, *, has_masks=True, has_penalties=True):
    """Return random changes of five of the rows, of which the first has neither kind."""
    changes = torch.empty(5, len(Change), dtype=torch.int64)
    changes[:, Change.ROW] = torch.tensor([0, 2, 3, 4, 6])
    changes[:, Change.PLACE] = torch.tensor([-1, 0, 1, 2, -1] if has_penalties else [-1] * 5)
    changes[:, Change.MASK] = torch.tensor([-1, -1, 0, 1, 1] if has_masks else [-1] * 5)
    factors = torch.tensor([[1.3, 0.7, 0.25], [0.9, -0.1, 1.5], [2.0, 0.0, 0.3]])
    penalties = changes.view(torch.float64)
    penalties[:, Change.REPETITION :] = factors.double()[torch.tensor([0, 0, 1, 2, 0])]
    counts = torch.randint(4, (NUM_PLACES, VOCAB), generator=generator).clamp_min(1) - 1
    is_prompt = torch.rand(NUM_PLACES, VOCAB, generator=generator) < 0.1
    seen = (counts + PROMPT_TOKEN * is_prompt).to(torch.int32)
    num_words = (first_token + VOCAB) // 32 - 2  # tokens after the last word are not allowed
    size = (2, num_words)
    words = torch.randint(-(2**31), 2**31 - 1, size, generator=generator, dtype=torch.int32)
    none = torch.empty(0, 3, dtype=torch.int64)
    masks = words if has_masks else torch.empty(0, 0, dtype=torch.int32)
    return LogitEdits(changes, masks, none, none, seen if has_penalties else None)


@pytest.mark.parametrize("first_token", [0, 1000])
@pytest.mark.parametrize("num_drafts", [0, NUM_DRAFTS])
def test_logits_are_those_of_the_reference(first_token, num_drafts):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(NUM_ROWS, VOCAB, generator=generator) * 4
    logits[2, 5], logits[3, 6], logits[4, 7] = torch.nan, torch.inf, -torch.inf
    paths = torch.randint(VOCAB, (5, num_drafts), generator=generator) + first_token
    paths[:, 1:] = paths[:, :1]  # twice the same token
    paths[2] = -1
    own = edits(generator, first_token)
    found, expected = logits.clone(), logits.clone()
    edit_rows(found, own, paths, first_token)
    device_edits.edit_rows(expected, own, paths, first_token)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    is_changed = (found != logits).any(1) & ~logits.isnan().any(1)
    assert is_changed.tolist() == [False, False, False, True, True, False, True]


@pytest.mark.parametrize("kinds", [{"has_masks": False}, {"has_penalties": False}], ids=str)
def test_one_kind_of_change_suffices(kinds):
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(NUM_ROWS, VOCAB, generator=generator) * 4
    own, paths = edits(generator, 0, **kinds), torch.full((5, 0), -1)
    found, expected = logits.clone(), logits.clone()
    edit_rows(found, own, paths, 0)
    device_edits.edit_rows(expected, own, paths, 0)
    assert torch.equal(found, expected)
    assert not torch.equal(found, logits)
