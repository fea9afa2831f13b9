"""Served drafts are those of the trained module, after export and reload."""

from dataclasses import replace

import pytest
import torch

from specdec.kernels.reference.forward_batch import HiddenStates
from specdec.training.data.batches import Batch
from specdec.training.data.config import TrainingConfig
from specdec.training.data.corpus import Sample
from specdec.training.data.target import Target, TargetPrecision
from specdec.training.drafters.base import TRAINED_METHODS, drafter_class
from specdec.training.export import export
from tests.specdec.models.heads.driver import (
    KERNELS,
    TARGET_SIZES,
    VOCAB,
    head_logits,
    sequences,
)
from tests.specdec.tiny import tiny_llama_dir

DEPTH = 5
CONFIG = TrainingConfig(method="dspark", depth=DEPTH, markov_rank=12)  # of all methods


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    directory = tiny_llama_dir(tmp_path_factory.mktemp("target"), **TARGET_SIZES)
    return Target(directory, 64, TargetPrecision(kernels="torch"))


HEADS = [(method, None) for method in TRAINED_METHODS if method != "draft_model"]
HEADS += [("dspark", kind) for kind in ("gated", "rnn")]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("method", "markov_head"), HEADS)
def test_served_logits_equal_those_of_the_trained_module(
    method, markov_head, kernels, target, tmp_path
):
    drafter = disturbed_drafter(method, target, markov_head)
    export(drafter, tmp_path, "float32", {})
    parts = sequences(num_drafts=DEPTH)
    served = head_logits(tmp_path, target.directory, parts, kernels=kernels)
    expected = torch.cat([trained_logits(drafter, part) for part in parts])
    torch.testing.assert_close(served, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(served.argmax(-1), expected.argmax(-1))


def disturbed_drafter(method, target, markov_head):
    """Make a drafter whose weights differ from their initial ones, all norms included."""
    torch.manual_seed(1)
    has_reduced = drafter_class(method).has_reduced_vocabulary
    token_ids = torch.arange(1, VOCAB, 2) if has_reduced else torch.arange(VOCAB)
    config = replace(CONFIG, markov_head=markov_head)
    drafter = drafter_class(method)(target, token_ids, config)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter) * parameter.shape[1] ** -0.5)
    return drafter


@torch.no_grad()
def trained_logits(drafter, part):
    """Return the logits [1, DEPTH, V] after the last known token of a sequence."""
    tokens = (*part.tokens, *part.drafts)
    batch = Batch.of([Sample(tokens, len(part.tokens) - 1, 0.0)])
    missing = batch.num_tokens - len(part.hidden)  # of the drafts: no draft reads them
    final = torch.cat([part.hidden, torch.full((missing, part.hidden.shape[1]), 100.0)])
    tapped = part.inputs[:, list(drafter.taps)]
    after = torch.full((missing, *tapped.shape[1:]), 100.0)
    states = drafter.states(batch, HiddenStates(final, torch.cat([tapped, after])))
    return drafter.logits(states[:, :1]).transpose(0, 1)
