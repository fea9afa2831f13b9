# Modules: specdec.training.sampled_softmax
"""Draft tokens in the loss of a step: those of the answers, and others that stand for the rest."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from specdec.training import sampled_softmax
from specdec.training.data.batches import Batch
from specdec.training.data.config import TrainingConfig
from specdec.training.data.corpus import Sample
from specdec.training.drafters.base import TRAINED_METHODS, drafter_class
from specdec.training.objective import Objective
from specdec.training.sampled_softmax import TokenSampler
from specdec.training.trainer import Data, Trainer
from specdec.types.errors import InvalidValueError
from tests.specdec.training import targets

CPU = torch.device("cpu")
CONFIG = TrainingConfig(depth=3, loss="kl")
TEXTS = [
    Sample((8, 6, 4, 2, 8, 6, 4, 2), num_prompt_tokens=2, temperature=0.0),
    Sample((2, 4, 6, 7, 8, 10, 12), num_prompt_tokens=1, temperature=0.8),
]
ANSWERED = (2, 4, 6, 7, 8, 10, 12)


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(sampled_softmax, "_NUM_OTHERS", 50)


def draw(token_ids, seed=0):
    return TokenSampler(token_ids, ANSWERED).draw(np.random.default_rng(seed), CPU)


def test_answered_tokens_are_always_drawn_and_others_at_random(few):
    token_ids = range(2, 302, 2)  # 7 is no draft token
    first, same, other = (draw(token_ids, seed) for seed in (0, 0, 1))
    for each in (first, other):
        assert each.columns[:6].tolist() == [0, 1, 2, 3, 4, 5]
        assert len(set(each.columns.tolist())) == 56
        assert not each.offsets[:6].any()
        torch.testing.assert_close(each.offsets[6:].exp(), torch.full((50,), 144 / 50))
    assert torch.equal(first.columns, same.columns)
    assert not torch.equal(first.columns, other.columns)


def test_drawn_others_stand_for_all_of_them(few):
    """The mean over 400 draws of a sum of exponentials, within 5 standard errors."""
    torch.manual_seed(0)
    logits = torch.randn(300)
    sums = []
    for seed in range(400):
        tokens = draw(range(300), seed)
        sums.append((logits[tokens.columns] + tokens.offsets).exp().sum())
    found = torch.stack(sums)
    assert (found.mean() - logits.exp().sum()).abs() < 5 * found.std() / 20


def gradients(drafter, target, tokens):
    drafter.zero_grad()
    batch = Batch.of(TEXTS)
    hidden = target.hidden_states(batch, drafter.taps)
    objective = Objective(CONFIG, target, drafter.token_ids)
    loss = objective.backward(drafter, batch, hidden, tokens).item()
    return loss, {name: each.grad for name, each in drafter.named_parameters()}


@pytest.mark.parametrize("method", TRAINED_METHODS)
def test_all_tokens_in_any_order_have_the_gradients_of_the_whole_softmax(method, target):
    torch.manual_seed(0)
    drafter = drafter_class(method)(target, torch.arange(target.config.vocab_size), CONFIG)
    loss, whole = gradients(drafter, target, None)
    tokens = draw(range(target.config.vocab_size))
    assert len(tokens.columns) == target.config.vocab_size
    own_loss, own = gradients(drafter, target, tokens)
    assert own_loss == pytest.approx(loss, rel=1e-4, abs=1e-6)
    for name in whole:
        torch.testing.assert_close(own[name], whole[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", ["eagle3", "dspark", "medusa"])
def test_rows_that_are_not_drawn_have_no_gradient(method, target, few):
    drafter = drafter_class(method)(target, torch.arange(target.config.vocab_size), CONFIG)
    tokens = draw(range(target.config.vocab_size))
    _, found = gradients(drafter, target, tokens)
    drawn = torch.zeros(target.config.vocab_size, dtype=torch.bool)
    drawn[tokens.columns] = True
    has_gradient = found["lm_head.weight"].any(1)
    assert not has_gradient[~drawn].any()
    assert has_gradient[drawn].all()


@pytest.mark.parametrize(
    ("name", "value"), [("loss", "ce"), ("loss", "dspark"), ("position_weights", "d_pace")]
)
def test_a_loss_of_the_most_probable_token_cannot_be_sampled(
    name, value, target, samples, tmp_path
):
    config = replace(targets.CONFIG, method="medusa", **{name: value})
    data = Data(samples[4:], samples[:4], list(range(target.config.vocab_size)), {})
    Trainer(config, target, data, tmp_path)
    with pytest.raises(InvalidValueError, match=f"^{name} is '{value}'; it must be one of"):
        Trainer(config, target, replace(data, is_sampled=True), tmp_path)


@pytest.mark.parametrize("is_sampled", [True, False])
def test_a_sampled_run_trains_the_rows_of_its_answers(
    is_sampled, target, samples, tmp_path, monkeypatch
):
    """Without others to draw; all rows otherwise. Weight decay would change each of them."""
    monkeypatch.setattr(sampled_softmax, "_NUM_OTHERS", 0)
    config = replace(targets.CONFIG, method="medusa", num_epochs=1, weight_decay=0.0)
    token_ids = list(range(target.config.vocab_size))
    data = Data(samples[4:], samples[:4], token_ids, {}, is_sampled=is_sampled)
    run = Trainer(config, target, data, tmp_path)
    before = run.drafter.lm_head.weight.detach().clone()
    run.run(lambda progress: None)
    changed = (run.drafter.lm_head.weight != before).any(1).nonzero().flatten().tolist()
    answered = {token_id for sample in samples[4:] for token_id in sample.answer}
    assert set(changed) == (answered if is_sampled else set(token_ids))
