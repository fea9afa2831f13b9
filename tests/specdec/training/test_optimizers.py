# Modules: specdec.training.data.config
"""The learning rate, and the optimizers' state and groups."""

import dataclasses
from functools import partial

import pytest
import torch
from torch import nn

from specdec.training.data.config import TrainingConfig
from specdec.training.optimizers import Optimizers, learning_rate
from specdec.types.errors import InvalidValueError

CONFIG = TrainingConfig(learning_rate=0.1, warmup=0.2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Linear(4, 4)
        self.lm_head = nn.Linear(4, 6, bias=False)

    def learn(self, optimizers, step):
        self.lm_head(self.hidden(torch.eye(4))).square().sum().backward()
        optimizers.step(step, 10)


def after(steps=1, **changes):
    model = Model()
    optimizers = Optimizers(dataclasses.replace(CONFIG, **changes), model)
    for step in range(steps):
        model.learn(optimizers, step)
    return model


def test_the_rate_grows_and_decays_to_a_tenth():
    rates = [learning_rate(CONFIG, step, 10) for step in range(11)]
    assert rates[:3] == pytest.approx([0.05, 0.1, 0.1])
    assert rates[10] == pytest.approx(0.01)
    assert rates[2:] == sorted(rates[2:], reverse=True)


def test_muon_orthogonalizes_the_updates_of_hidden_matrices_alone():
    before, muon, adamw = Model(), after(optimizer="muon"), after()
    update = muon.hidden.weight - before.hidden.weight * (1 - 0.05 * CONFIG.weight_decay)
    spread = torch.linalg.svdvals(update.detach())
    assert spread[-1] > 0.3 * spread[0]
    assert not torch.equal(muon.hidden.weight, adamw.hidden.weight)
    assert torch.equal(muon.lm_head.weight, adamw.lm_head.weight)
    assert torch.equal(muon.hidden.bias, adamw.hidden.bias)


def test_weight_decay_is_of_matrices_alone():
    without, strong = after(weight_decay=0.0), after(weight_decay=1.0)
    assert not torch.equal(without.lm_head.weight, strong.lm_head.weight)
    assert torch.equal(without.hidden.bias, strong.hidden.bias)


def test_a_long_gradient_is_clipped():
    # AdamW's first update has the sign of the gradient only; the second one shows its length.
    assert not torch.equal(
        after(3, clip_norm=1e-3).lm_head.weight, after(3, clip_norm=1e6).lm_head.weight
    )


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("is_fused", [(False, False), (True, False), (False, True)])
def test_a_restored_state_continues_equally(optimizer, is_fused, monkeypatch):
    """Also where AdamW is fused, as on a GPU, in one of both runs."""
    adamw, config = torch.optim.AdamW, dataclasses.replace(CONFIG, optimizer=optimizer)

    def new(model, is_fused):
        kind = partial(adamw, fused=is_fused)
        monkeypatch.setattr(torch.optim, "AdamW", lambda *args, fused, **rest: kind(*args, **rest))
        return Optimizers(config, model)

    model, copy = Model(), Model()
    optimizers, restored = map(new, (model, copy), is_fused)
    for step in range(2):
        model.learn(optimizers, step)
    copy.load_state_dict(model.state_dict())
    restored.load({name: each.clone() for name, each in optimizers.tensors().items()})
    model.learn(optimizers, 2)
    copy.learn(restored, 2)
    for left, right in zip(model.parameters(), copy.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6 if any(is_fused) else 0, atol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "hinge"}, "loss is 'hinge'; it must be one of kl, ce, tv, lk_hybrid, coupling"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0; it must be from 1e-09 to 1"),
        ({"batch_tokens": 0}, "batch_tokens is 0; it must be from 1 to"),
        ({"held_out": 0.9}, "held_out is 0.9; it must be from 1e-06 to 0.5"),
        ({"depth": "3"}, "depth is '3'; it must be of type int"),
    ],
)
def test_settings_out_of_their_limits_are_rejected(changes, message):
    with pytest.raises(InvalidValueError) as caught:
        dataclasses.replace(CONFIG, **changes)
    assert message in str(caught.value)
