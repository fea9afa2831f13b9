# Modules: specdec.training.drafters.base, specdec.training.drafters.eagle3
# Modules: specdec.training.drafters.medusa, specdec.training.drafters.mlp_speculator
"""Gradients by chunks, the draft tokens that count, and the settings of the objective."""

import dataclasses

import pytest
import torch

from specdec.kernels.reference.forward_batch import HiddenStates
from specdec.training import objective
from specdec.training.data.batches import Batch
from specdec.training.data.config import TrainingConfig
from specdec.training.data.corpus import Sample
from specdec.training.data.target import Target
from specdec.training.drafters.base import TRAINED_METHODS, drafter_class
from specdec.training.objective import Objective

CONFIG = TrainingConfig(depth=3, loss="kl", decay=0.5)
DRAFTED = torch.arange(0, 320, 2)  # the even tokens
TEXTS = [
    Sample((8, 6, 4, 2, 8, 6, 4, 2), num_prompt_tokens=2, temperature=0.0),
    Sample((2, 4, 6, 7, 8, 10, 12), num_prompt_tokens=1, temperature=0.8),
]


@pytest.fixture
def drafter(target):
    torch.manual_seed(0)
    return drafter_class("eagle3")(target, DRAFTED, CONFIG)


@pytest.fixture
def batch():
    return Batch.of(TEXTS)


@pytest.fixture
def hidden(target, drafter, batch):
    return target.hidden_states(batch, drafter.taps)


def gradients(drafter, target, batch, hidden, **changes):
    """Return the loss and the gradient of the output head."""
    drafter.zero_grad()
    config = dataclasses.replace(CONFIG, **changes)
    loss = Objective(config, target, DRAFTED).backward(drafter, batch, hidden).item()
    return loss, {name: each.grad.clone() for name, each in drafter.named_parameters()}


def test_chunks_do_not_change_the_gradients(monkeypatch, drafter, target, batch, hidden):
    loss, whole = gradients(drafter, target, batch, hidden)
    monkeypatch.setitem(objective._CHUNK_LOGITS, "cpu", 2 * CONFIG.depth * len(DRAFTED))
    other_loss, parts = gradients(drafter, target, batch, hidden)
    assert loss == pytest.approx(other_loss, rel=1e-5)
    for name in whole:
        torch.testing.assert_close(whole[name], parts[name], rtol=1e-3, atol=1e-6)


def test_the_loss_is_the_weighted_mean_over_reachable_drafts(drafter, target, batch, hidden):
    """Draft tokens after an odd token of the second text, 7, are not reached."""
    loss, _ = gradients(drafter, target, batch, hidden)
    with torch.no_grad():
        log_q = drafter.logits(drafter.states(batch, hidden)).log_softmax(-1)
    total = 0.0
    counted = {0: [3, 3, 3, 2, 1], 1: [1, 0, 3, 2, 1]}  # draft tokens of each base
    for span, counts in zip(batch.spans, counted.values(), strict=True):
        for base, count in zip(range(span.bases.start, span.bases.stop), counts, strict=True):
            for index in range(count):
                state = hidden.final[batch.bases[base] + index]
                p = (target.lm_head[DRAFTED] @ state).softmax(-1)
                kl = (p * (p.log() - log_q[index, base])).sum().item()
                total += 0.5**index * kl
    assert loss == pytest.approx(total / batch.num_bases, rel=1e-4)


def test_a_sample_learns_nothing_from_its_neighbour(drafter, target, batch, hidden):
    alone = Batch.of(TEXTS[1:])
    states = drafter.states(alone, target.hidden_states(alone, drafter.taps))
    both = drafter.states(batch, hidden)[:, batch.spans[1].bases]
    exists = alone.exists(CONFIG.depth)
    torch.testing.assert_close(states[exists], both[exists], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", TRAINED_METHODS)
def test_answers_of_one_token_change_no_gradient(method, target):
    drafter = drafter_class(method)(target, torch.arange(target.config.vocab_size), CONFIG)
    own = Objective(CONFIG, target, drafter.token_ids)
    found = []
    for samples in (TEXTS, [Sample((9, 8), 1, 0.0), *TEXTS]):
        drafter.zero_grad()
        batch = Batch.of(samples)
        loss = own.backward(drafter, batch, target.hidden_states(batch, drafter.taps)).item()
        found.append((loss, [each.grad.clone() for each in drafter.parameters()]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", ["eagle3", "dspark"])
def test_a_sample_may_fill_the_context(method, target):
    length = target.config.max_position_embeddings
    full = Target(target.directory, length, target.precision)
    drafter = drafter_class(method)(full, DRAFTED, CONFIG)
    batch = Batch.of([Sample((8,) * length, length - 2, 0.0)])
    hidden = full.hidden_states(batch, drafter.taps)
    assert Objective(CONFIG, full, DRAFTED).backward(drafter, batch, hidden) > 0


def test_the_target_s_distribution_has_full_precision(monkeypatch, drafter, target, batch, hidden):
    seen = []

    def loss(log_q, teacher):
        seen.append(teacher.p)
        return log_q.mean(-1)

    monkeypatch.setattr(objective, "LOSSES", {"kl": loss})
    for precision in ("float32", "bfloat16"):
        gradients(drafter, target, batch, hidden, precision=precision)
    assert torch.equal(*seen)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": "tv"},
        {"loss": "coupling"},
        {"loss": "dspark"},
        {"position_weights": "d_pace"},
        {"decay": 0.9},
        {"precision": "bfloat16"},
    ],
)
def test_a_setting_changes_the_loss(changes, drafter, target, batch, hidden):
    loss, _ = gradients(drafter, target, batch, hidden)
    other, _ = gradients(drafter, target, batch, hidden, **changes)
    assert other != pytest.approx(loss, rel=1e-6)
    if changes == {"precision": "bfloat16"}:
        assert other == pytest.approx(loss, rel=0.05)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_perfect_drafter_is_always_right(temperature, target):
    """A drafter whose logits are the target's drafts the text, with the noise of the text."""
    samples = [dataclasses.replace(each, temperature=temperature) for each in TEXTS]
    batch = Batch.of(samples)
    hidden = target.hidden_states(batch, ())
    # At temperature 0 the text is not the target's choice: its logits are replaced.
    final = hidden.final if temperature else target.lm_head[batch.next_ids] * 100
    perfect = _Perfect(target, final)
    config = dataclasses.replace(CONFIG, depth=2)
    everything = torch.arange(target.config.vocab_size)
    generator = torch.Generator().manual_seed(0)
    drafts = Objective(config, target, everything).drafts(
        perfect, batch, HiddenStates(final, hidden.tapped), generator
    )
    text = torch.stack([batch.next_ids[batch.after(index)] for index in range(2)])
    exists = batch.exists(2)
    expected = text if temperature else (final @ target.lm_head.T).argmax(-1)
    if temperature == 0:
        expected = torch.stack([expected[batch.after(index)] for index in range(2)])
    assert torch.equal(drafts[exists], expected[exists])


def test_other_draft_tokens_meet_the_same_noise(target):
    """Without logits the noise alone drafts: 159 of 160 tokens are common, at other places."""
    batch = Batch.of([dataclasses.replace(each, temperature=0.8) for each in TEXTS])
    hidden = target.hidden_states(batch, ())
    found = []
    last = len(DRAFTED) - 1
    other = torch.cat([torch.tensor([0, 1]), DRAFTED[1:-1]])  # 1 in place of the last
    for token_ids, columns in ((DRAFTED, None), (other, [0, last, *range(1, last)])):
        generator, silent = torch.Generator().manual_seed(0), _Silent(len(token_ids))
        own = Objective(CONFIG, target, token_ids, columns)
        found.append(own.drafts(silent, batch, hidden, generator))
    assert (found[0] == found[1]).float().mean() > 0.8


class _Silent:
    """A drafter whose logits are zeros."""

    draft_temperature = 1.0

    def __init__(self, num_tokens):
        self._num_tokens = num_tokens

    def states(self, batch, hidden):
        return torch.zeros(CONFIG.depth, batch.num_bases, 1)

    def logits(self, states):
        return states.expand(-1, -1, self._num_tokens)


class _Perfect:
    """A drafter whose draft tokens have the target's logits."""

    draft_temperature = 1.0

    def __init__(self, target, final):
        self._target, self._final = target, final

    def states(self, batch, hidden):
        return torch.stack([self._final[batch.after(index)] for index in range(2)])

    def logits(self, states):
        return states @ self._target.lm_head.T
