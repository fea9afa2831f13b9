# Modules: specdec.training.drafters.blocks, specdec.training.drafters.markov
"""Blocks after many bases at once, the heads of DSpark, and the files of both block drafters."""

import dataclasses
import json
import math

import pytest
import torch
from safetensors.torch import load_file

from specdec.kernels.reference.forward_batch import HiddenStates
from specdec.models.heads.config import HeadConfig
from specdec.training.data.batches import Batch
from specdec.training.data.config import TrainingConfig
from specdec.training.data.corpus import Sample
from specdec.training.drafters import blocks
from specdec.training.drafters.base import drafter_class
from specdec.training.drafters.dspark import DSparkDrafter
from specdec.training.export import export
from specdec.training.head_adapter import HeadAdapter
from specdec.training.objective import Objective
from specdec.training.optimizers import is_outer
from specdec.training.warm_start import ExportedHead

CONFIG = TrainingConfig(method="dspark", depth=3, markov_rank=8, loss="kl", decay=0.5)
BLOCK_METHODS = ["dspark", "dflash"]
DRAFTED = torch.arange(0, 320, 2)
TEXTS = [
    Sample((8, 6, 4, 2, 8, 6, 4, 2, 8, 6), num_prompt_tokens=2, temperature=0.0),
    Sample((5, 7), num_prompt_tokens=1, temperature=0.0),  # without a base
    Sample((2, 4, 6, 8, 8, 10, 12), num_prompt_tokens=1, temperature=0.8),
]


def made(method, target, **changes):
    """Return a drafter whose Markov and confidence heads have an effect."""
    torch.manual_seed(0)
    drafter = drafter_class(method)(target, DRAFTED, dataclasses.replace(CONFIG, **changes))
    if method == "dspark":
        head = drafter.markov
        for layer in filter(None, (head.output_head, head.projection, drafter.confidence_head)):
            torch.nn.init.normal_(layer.weight)
    return drafter


@pytest.fixture
def batch():
    return Batch.of(TEXTS)


@pytest.mark.parametrize("method", BLOCK_METHODS)
@pytest.mark.parametrize("limit", [1, 2, 5])
def test_groups_do_not_change_the_drafts(method, limit, target, batch, monkeypatch):
    drafter = made(method, target)
    hidden = target.hidden_states(batch, drafter.taps)
    expected = drafter.states(batch, hidden)
    monkeypatch.setattr(blocks, "_GROUP_BASES", limit)
    torch.testing.assert_close(drafter.states(batch, hidden), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", BLOCK_METHODS)
def test_a_base_drafts_the_same_without_the_others(method, target, batch):
    drafter = made(method, target)
    hidden = target.hidden_states(batch, drafter.taps)
    expected = drafter.states(batch, hidden)
    for sample, span in zip(TEXTS, batch.spans, strict=True):
        alone = Batch.of([sample])
        own = HiddenStates(hidden.final[span.tokens], hidden.tapped[span.tokens])
        for base in range(span.num_bases):
            kept = dataclasses.replace(
                alone,
                spans=(dataclasses.replace(alone.spans[0], bases=slice(0, 1)),),
                bases=alone.bases[base : base + 1],
            )
            found, exists = drafter.states(kept, own)[:, 0], kept.exists(CONFIG.depth)[:, 0]
            wanted = expected[:, span.bases.start + base]
            torch.testing.assert_close(found[exists], wanted[exists], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", BLOCK_METHODS)
def test_a_draft_reads_the_features_before_its_base_alone(method, target):
    drafter = made(method, target)
    batch = Batch.of(TEXTS[:1])
    hidden = target.hidden_states(batch, drafter.taps)
    expected = drafter.states(batch, hidden)
    base = 3
    place = int(batch.bases[base])
    for changed, is_read in ((place, False), (place - 1, True)):
        tapped = hidden.tapped.clone()
        tapped[changed] += 1.0
        found = drafter.states(batch, HiddenStates(hidden.final, tapped))
        assert torch.equal(found[:, base], expected[:, base]) is not is_read


def test_the_keys_and_the_mask_of_a_call_do_not_grow_with_the_bases(target):
    length = 3 * blocks._GROUP_BASES
    batch = Batch.of([Sample((8,) * (length + 1), 0, 0.0)])
    drafter = made("dspark", target)
    found = blocks.Blocks.of(batch, 3, drafter.mask_token_id, drafter._rotary)
    assert len(found.groups) == 3
    for group in found.groups:
        rows, columns = group.is_visible.shape
        assert rows == 3 * blocks._GROUP_BASES
        assert columns == rows + group.context.stop - group.context.start < rows + length


def test_a_batch_without_bases_changes_nothing(target):
    drafter, batch = made("dspark", target), Batch.of(TEXTS[1:2])
    hidden = target.hidden_states(batch, drafter.taps)
    assert Objective(CONFIG, target, DRAFTED).backward(drafter, batch, hidden) == 0
    assert not any(each.grad is not None and each.grad.any() for each in drafter.parameters())


def test_the_confidence_head_is_trained_by_position(target, batch, monkeypatch):
    """At first its probability is a half, whose cross entropy is log 2."""
    torch.manual_seed(0)
    drafter = drafter_class("dspark")(target, DRAFTED, CONFIG)
    hidden = target.hidden_states(batch, drafter.taps)
    objective = Objective(CONFIG, target, DRAFTED)
    loss = objective.backward(drafter, batch, hidden)
    assert drafter.confidence_head.weight.grad.abs().max() > 0
    monkeypatch.setattr(DSparkDrafter, "confidence", lambda *_: None)
    without = objective.backward(drafter, batch, hidden)
    weights = (0.5 ** torch.arange(CONFIG.depth))[:, None] * batch.exists(CONFIG.depth)
    expected = math.log(2) * weights.sum().item() / batch.num_bases
    assert loss - without == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_the_projection_is_a_hidden_matrix_without_an_adapter(kind, target, tmp_path):
    drafter = made("dspark", target, markov_head=kind)
    outer = {name for name, _ in drafter.markov.named_parameters(prefix="markov") if is_outer(name)}
    assert outer == {"markov.embedding.weight", "markov.output_head.weight"}
    export(drafter, tmp_path, "float32", {})
    HeadAdapter(drafter, ExportedHead(tmp_path), 2)
    assert not any(each.requires_grad for each in drafter.markov.parameters())


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_the_markov_head_reads_the_token_before_and_rnn_the_whole_path(kind, target):
    drafter = made("dspark", target, markov_head=kind)
    first = Batch.of([Sample((2, 4, 6, 8, 10), 1, 0.0)])
    other = dataclasses.replace(first, token_ids=first.token_ids.clone())
    other.token_ids[2] = 12
    hidden = target.hidden_states(first, drafter.taps)
    before, after = (drafter.logits(drafter.states(each, hidden)[:, :1]) for each in (first, other))
    # Base 0 is token 1, so token 2 is the one before its draft token 1.
    is_changed = [not torch.equal(*pair) for pair in zip(before, after, strict=True)]
    assert is_changed == [False, True, kind == "rnn"]
    if kind == "vanilla":
        head, change = drafter.markov, after[1, 0] - before[1, 0]
        rows = head.embedding.weight[[12, 6]] @ head.output_head.weight.T
        torch.testing.assert_close(change, rows[0] - rows[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("method", BLOCK_METHODS)
def test_files_are_read_as_the_method_that_was_trained(method, target, tmp_path):
    drafter = made(method, target, num_layers=4)  # more than the target has
    export(drafter, tmp_path, "float16", {})
    head = HeadConfig.from_directory(tmp_path, target.config)
    assert (head.method, head.max_draft_tokens, head.num_draft_tokens) == (method, 3, 3)
    assert (head.num_kv_layers, head.draft_vocab_size) == (4, len(DRAFTED))
    assert head.taps == drafter.taps
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["block_size"] == (3 if method == "dspark" else 4)
    assert config["sample_from_anchor"] is (method == "dspark")
    assert config["mask_token_id"] not in target.config.eos_token_ids
    tensors = load_file(tmp_path / "model.safetensors")
    size, vocab_size = target.config.hidden_size, target.config.vocab_size
    expected = {
        "markov_head.markov_w1.weight": (vocab_size, 8),
        "markov_head.markov_w2.weight": (len(DRAFTED), 8),
        "confidence_head.proj.weight": (1, size + 8),
        "confidence_head.proj.bias": (1,),
    }
    for name, shape in expected.items():
        found = tuple(tensors[name].shape) if name in tensors else None
        assert found == (shape if method == "dspark" else None)
