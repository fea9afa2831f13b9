"""Losses against their definitions, and the weights of the places in a draft."""

import pytest
import torch

from specdec.training.losses import (
    LOSSES,
    Teacher,
    confidence_loss,
    d_pace_weights,
    decayed_weights,
)

GENERATOR = torch.Generator().manual_seed(4)
LOGITS = torch.randn(3, 5, 11, generator=GENERATOR, dtype=torch.float64)
TARGET = 2 * torch.randn(3, 5, 11, generator=GENERATOR, dtype=torch.float64)


def rejection(p, q):
    return 1 - torch.minimum(p, q).sum(-1)


DEFINITIONS = {
    "kl": lambda p, q: (p * (p.log() - q.log())).sum(-1),
    "ce": lambda p, q: -q.log().gather(-1, p.argmax(-1)[..., None])[..., 0],
    "tv": rejection,
    "dspark": lambda p, q: 0.1 * DEFINITIONS["ce"](p, q) + 0.9 * (p - q).abs().sum(-1),
    "coupling": lambda p, q: 1 - (1 - rejection(p, q)) / (1 + rejection(p, q)),
}
DEFINITIONS["lk_hybrid"] = lambda p, q: torch.lerp(
    DEFINITIONS["tv"](p, q), DEFINITIONS["kl"](p, q), torch.exp(-3 * (1 - rejection(p, q)))
)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_equals_its_definition(name):
    found = LOSSES[name](LOGITS.log_softmax(-1), Teacher.of_logits(TARGET))
    expected = DEFINITIONS[name](TARGET.softmax(-1), LOGITS.softmax(-1))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, check_dtype=False)


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_down_the_gradient_lowers_the_loss(name):
    teacher = Teacher.of_logits(TARGET)
    logits = LOGITS.clone().requires_grad_()
    before = LOSSES[name](logits.log_softmax(-1), teacher).sum()
    before.backward()
    after = LOSSES[name]((logits - 0.05 * logits.grad).log_softmax(-1), teacher).sum()
    assert after < before - 1e-3


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("ce", "dspark")])
def test_a_perfect_draft_has_no_loss(name):
    found = LOSSES[name](TARGET.log_softmax(-1), Teacher.of_logits(TARGET))
    torch.testing.assert_close(found, torch.zeros_like(found), rtol=0, atol=1e-5)


def test_the_best_confidence_is_the_probability_of_acceptance():
    teacher, log_q = Teacher.of_logits(TARGET), LOGITS.float().log_softmax(-1).requires_grad_()
    acceptance = 1 - rejection(TARGET.softmax(-1), LOGITS.softmax(-1))
    log_odds = acceptance.logit().float().requires_grad_()
    confidence_loss(log_odds, log_q, teacher).sum().backward()
    torch.testing.assert_close(log_odds.grad, torch.zeros_like(log_odds), rtol=0, atol=1e-5)
    assert log_q.grad is None
    higher = confidence_loss(log_odds.detach() + 0.5, log_q.detach(), teacher)
    assert (higher > confidence_loss(log_odds.detach(), log_q.detach(), teacher)).all()


def test_weights_decay_from_one_place_to_the_next():
    assert decayed_weights(3, 0.5).tolist() == [[1.0], [0.5], [0.25]]


def test_d_pace_weights_are_the_accepted_tokens_that_depend_on_a_place():
    log_q = LOGITS.log_softmax(-1)
    teacher = Teacher.of_logits(TARGET)
    smoothed = 0.5 * torch.exp(-LOSSES["ce"](log_q, teacher)) + 0.5
    first, second, third = smoothed
    expected = [
        first + first * second + first * second * third,
        first * second + first * second * third,
        first * second * third,
    ]
    all_trained = torch.ones(3, 5, dtype=torch.bool)
    found = d_pace_weights(log_q, teacher, all_trained)
    torch.testing.assert_close(found, torch.stack(expected))


def test_d_pace_weights_leave_out_tokens_that_are_not_trained():
    log_q, teacher = LOGITS.log_softmax(-1), Teacher.of_logits(TARGET)
    is_trained = torch.ones(3, 5, dtype=torch.bool)
    is_trained[2] = False
    found = d_pace_weights(log_q, teacher, is_trained)
    shorter = Teacher(teacher.p[:2], teacher.negative_entropy[:2])
    expected = d_pace_weights(log_q[:2], shorter, is_trained[:2])
    torch.testing.assert_close(found[:2], expected)
    assert not found[2].any()
