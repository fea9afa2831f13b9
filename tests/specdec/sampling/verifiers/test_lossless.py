"""Lossless tests: the output of the lossless verifiers has the target's distribution."""

from itertools import accumulate, product

import numpy as np
import pytest
import torch

from tests.specdec.sampling.chi_square import (
    FALSE_ALARM,
    chi_square_excess,
    chi_square_p_value,
    total_variation,
)
from tests.specdec.sampling.verifiers.trials import Speculation, markov, positional, random_logits

VERIFIERS = ["coupled", "rejection", "block"]
LIMIT = 10  # standard deviations of chi-square, not reached by chance
LENGTH = 3


def softmax(logits, temperature):
    return (logits.double() / temperature).softmax(-1).numpy()


def check_positions(verifier, vocab_size, num_trials, temperature, num_draft, num_listed):
    """Check the distribution of each position; positions are independent here."""
    target = random_logits(LENGTH, vocab_size, spread=1.0, seed=vocab_size)
    draft = target + random_logits(LENGTH, vocab_size, spread=0.7, seed=vocab_size + 1)
    speculation = Speculation(
        verifier,
        positional(target),
        positional(draft),
        vocab_size,
        temperature,
        num_draft,
        num_listed,
    )
    trials = speculation.generate(num_trials, LENGTH)
    assert trials.num_kept > 0
    for place, probs in enumerate(softmax(target, temperature)):
        assert chi_square_excess(trials.token_ids[:, place], probs) < LIMIT, place


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize(("temperature", "num_draft"), [(0.6, 3), (1.0, 1)])
def test_every_position_has_the_targets_distribution(verifier, temperature, num_draft):
    check_positions(verifier, 256, 2560, temperature, num_draft, num_listed=64)


@pytest.mark.slow
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("num_draft", [1, 3])
def test_every_position_of_a_large_vocabulary_has_the_targets_distribution(
    verifier, temperature, num_draft
):
    check_positions(verifier, 4096, 40_960, temperature, num_draft, num_listed=256)


def check_opposite_draft(verifier, num_trials, temperature, num_draft):
    target = random_logits(LENGTH, 16, spread=1.5, seed=7)
    speculation = Speculation(
        verifier, positional(target), positional(-target), 16, temperature, num_draft
    )
    trials = speculation.generate(num_trials, LENGTH)
    assert trials.acceptance_rate < 0.3
    for place, probs in enumerate(softmax(target, temperature)):
        assert chi_square_excess(trials.token_ids[:, place], probs) < LIMIT, place
    return trials, softmax(target, temperature)


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_an_opposite_draft_distribution_is_corrected(verifier):
    trials, probs = check_opposite_draft(verifier, 20_000, 1.0, 1)
    for place in range(LENGTH):
        assert total_variation(trials.token_ids[:, place], probs[place]) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("num_draft", [1, 3])
def test_an_opposite_draft_distribution_is_corrected_in_many_trials(
    verifier, temperature, num_draft
):
    check_opposite_draft(verifier, 200_000, temperature, num_draft)


@pytest.mark.parametrize(
    ("verifier", "num_draft"),
    [("coupled", 2), ("rejection", 3), ("block", 2), ("block", 4)],
)
def test_consecutive_tokens_have_the_targets_joint_distribution(verifier, num_draft):
    """Models that depend on the last token expose a wrong weight of a prefix."""
    size, num_trials = 6, 20_000
    target = random_logits(size, size, spread=1.0, seed=11)
    draft = target + random_logits(size, size, spread=1.0, seed=12)
    speculation = Speculation(verifier, markov(target), markov(draft), size, 1.0, num_draft)
    tokens = speculation.generate(num_trials, 4).token_ids
    probs = softmax(target, 1.0)
    first = probs[0]
    second = first @ probs
    pairs = (second[:, None] * probs).ravel()
    assert chi_square_p_value(tokens[:, 1] * size + tokens[:, 2], pairs) > FALSE_ALARM
    for place, before in ((0, first), (1, second)):
        triples = (before[:, None, None] * probs[:, :, None] * probs[None]).ravel()
        found = tokens[:, place] * size**2 + tokens[:, place + 1] * size + tokens[:, place + 2]
        assert chi_square_p_value(found, triples) > FALSE_ALARM, place


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_the_residual_after_a_prefix_corrects_the_whole_prefix(verifier):
    """The first draft token comes twice too often, so p_1 is about 0.5; it is often the last kept.

    What then follows has to come from max(p_1 p - q, 0), about (0, 0.05, 0.25) here. The residual
    of the second token alone would be about (0, 0.3, 0.5).
    """
    target = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.5, 0.5], [0.2, 0.3, 0.5]])
    draft = torch.tensor([[0.98, 0.01, 0.01], [0.8, 0.2, 0.0], [0.2, 0.3, 0.5]])
    speculation = Speculation(verifier, positional(target.log()), positional(draft.log()), 3, 1, 2)
    trials = speculation.generate(10_000, 3)
    if verifier == "block":
        assert (trials.num_accepted == 1).mean() > 0.3
    triples = np.einsum("i,j,k->ijk", *target.double().numpy()).ravel()
    found = trials.token_ids @ [9, 3, 1]
    assert chi_square_p_value(found, triples / triples.sum()) > FALSE_ALARM


@pytest.mark.parametrize(
    ("verifier", "cut"),
    [
        ("rejection", {"top_k": 5}),
        ("block", {"top_p": 0.7}),
        ("block", {"top_k": 9, "top_p": 0.8}),
    ],
)
def test_truncated_tokens_are_never_output(verifier, cut):
    size = 16
    target = random_logits(1, size, spread=1.0, seed=21)
    draft = target + random_logits(1, size, spread=1.0, seed=22)
    speculation = Speculation(verifier, positional(target), positional(draft), size, 0.8, 2, **cut)
    probs = softmax(target, 0.8)[0]
    order = np.argsort(-probs)
    kept = order[: cut.get("top_k", size)]
    shares = probs[kept] / probs[kept].sum()
    kept = kept[: int((shares.cumsum() < cut.get("top_p", 1.1)).sum()) + 1]
    left = np.zeros(size)
    left[kept] = probs[kept] / probs[kept].sum()
    tokens = speculation.generate(3000, 2).token_ids
    for place in range(2):
        assert chi_square_p_value(tokens[:, place], left) > FALSE_ALARM


@pytest.mark.parametrize("seed", [31, 32])
def test_block_accepts_at_least_as_many_tokens_as_rejection(seed):
    size, num_trials = 12, 8000
    target = random_logits(size, size, spread=1.5, seed=seed)
    draft = target + random_logits(size, size, spread=1.0, seed=seed + 10)
    accepted = {
        verifier: Speculation(verifier, markov(target), markov(draft), size, 1.0, 4)
        .generate(num_trials, 1)
        .num_accepted
        for verifier in ("rejection", "block")
    }
    # Both have the same drafts. Six standard errors: a false alarm once in a billion.
    gains = accepted["block"] - accepted["rejection"]
    assert gains.mean() > -6 * gains.std() / num_trials**0.5
    assert gains.mean() > 0.05  # block verification has an advantage on these pairs


def expected_length(verifier, target, draft, num_draft):
    """Return the mean number of accepted tokens after token 0, summed over all drafts."""
    length_of = {"rejection": rejection_length, "block": block_length}[verifier]
    total = 0.0
    for tokens in product(range(len(target)), repeat=num_draft):
        last = (0, *tokens[:-1])
        ratios = target[last, tokens] / draft[last, tokens]
        total += draft[last, tokens].prod() * length_of(target, draft, tokens, ratios)
    return total


def rejection_length(target, draft, tokens, ratios):
    return np.minimum(ratios, 1).cumprod().sum()


def block_length(target, draft, tokens, ratios):
    weights = list(accumulate(ratios, lambda weight, ratio: min(1, weight * ratio), initial=1))[1:]
    mean, none_longer = 0.0, 1.0
    for length in range(len(tokens), 0, -1):
        weight = weights[length - 1]
        if length == len(tokens):
            chance = weight
        else:
            last = tokens[length - 1]
            mass = np.maximum(weight * target[last] - draft[last], 0).sum()
            chance = mass / (mass + 1 - weight)
        mean += none_longer * chance * length
        none_longer *= 1 - chance
    return mean


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_mean_lengths_equal_those_of_the_papers(verifier):
    size, num_trials = 4, 10_000
    target = random_logits(size, size, spread=1.0, seed=41)
    draft = target + random_logits(size, size, spread=1.0, seed=42)
    speculation = Speculation(verifier, markov(target), markov(draft), size, 1.0, 3)
    accepted = speculation.generate(num_trials, 1).num_accepted
    expected = expected_length(verifier, softmax(target, 1.0), softmax(draft, 1.0), 3)
    # Six standard errors: a false alarm once in a billion.
    assert abs(accepted.mean() - expected) < 6 * accepted.std() / num_trials**0.5


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_the_target_as_its_own_draft_is_always_accepted(verifier):
    target = random_logits(16, 16, spread=1.5, seed=51)
    trials = Speculation(verifier, markov(target), markov(target), 16, 0.8, 3).generate(2000, 4)
    # p / q differs from 1 by float32 rounding: one rejection in millions.
    assert trials.acceptance_rate > 0.9999


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_a_deterministic_draft_is_corrected(verifier):
    """A prompt-lookup draft is verified as a sample of a distribution with one token."""
    size, num_trials = 8, 10_000
    target = random_logits(size, size, spread=1.0, seed=61)
    draft = random_logits(size, size, spread=1.0, seed=62)
    speculation = Speculation(
        verifier, markov(target), markov(draft), size, 1.0, 2, has_draft_probs=False
    )
    trials = speculation.generate(num_trials, 3)
    probs = softmax(target, 1.0)
    pairs = (probs[0][:, None] * probs).ravel()
    found = trials.token_ids[:, 0] * size + trials.token_ids[:, 1]
    assert chi_square_p_value(found, pairs) > FALSE_ALARM
    first = int(draft[0].argmax())
    chances = probs[0, first] * np.array([1, probs[first, int(draft[first].argmax())]])
    error = 6 * trials.num_accepted.std() / num_trials**0.5
    assert abs(trials.num_accepted.mean() - chances.sum()) < error
