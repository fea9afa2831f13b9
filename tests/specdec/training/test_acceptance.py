"""The acceptance length of drafts, and the noise that a text implies."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, kstest

from specdec.training.acceptance import Acceptance, is_longer, noise_given_choice
from specdec.training.data.batches import Batch
from specdec.training.data.corpus import Sample

TEXT = Sample((9, 8, 1, 2, 3, 4, 5, 6), num_prompt_tokens=2, temperature=0.0)
# Its bases are the tokens 1 to 5, with 2 to 6 after them.


def test_a_step_ends_at_the_first_wrong_draft():
    drafts = torch.tensor([[2, 3, 0, 5, 6], [3, 0, 0, 0, 0]])
    [found] = Acceptance.by_sample(Batch.of([TEXT]), drafts)
    # From base 1 two drafts are right, so the next base is 4, whose first draft, 5, is; then 6.
    assert (found.num_steps, found.num_accepted) == (2, 3)
    assert found.mean_length == 2.5
    assert found.num_bases == (5, 4)
    assert found.num_right == (4, 1)
    assert found.by_position == (0.8, 0.25)


def test_drafts_after_the_end_of_a_text_are_not_counted():
    drafts = torch.tensor([[0, 0, 0, 0, 6], [0, 0, 0, 0, 6]])
    for found in Acceptance.by_sample(Batch.of([TEXT, TEXT]), drafts.repeat(1, 2)):
        assert found.num_right == (1, 0)
        assert found.num_accepted == 1


def test_counts_of_samples_add_up():
    drafts = torch.tensor([[2, 3, 0, 5, 6]])
    one, two = Acceptance.by_sample(Batch.of([TEXT] * 2), drafts.repeat(1, 2))
    assert one == two
    both = Acceptance(2 * one.num_steps, 2 * one.num_accepted, (8,), (10,))
    assert Acceptance.sum([one, two]) == both


@pytest.mark.parametrize(
    ("saved", "is_expected"),
    [
        ([1] * 8, True),
        ([1] * 3, False),  # equal numbers have a deviation of one step
        ([1] * 2, False),
        ([4, 3, 5, 2], True),
        ([9, -4, 3, 0], False),  # a mean of 2 with a standard error of 2.7
        ([0, 0, 0, 0], False),
        ([-1, -1, -1, -1], False),
        ([5], False),  # no spread is known
    ],
)
def test_drafts_are_longer_where_samples_save_steps_beyond_chance(saved, is_expected):
    before = [Acceptance(20, 10, (), ()) for _ in saved]
    after = [Acceptance(20 - each, 10 + each, (), ()) for each in saved]
    assert is_longer(before, after) is is_expected


@pytest.mark.parametrize("num_samples", [3, 8])
def test_equal_drafters_pass_as_rarely_as_chance_allows(num_samples):
    draws = np.random.default_rng(0).poisson(50, (2000, 2, num_samples)).tolist()
    pairs = ([[Acceptance(each, 0, (), ()) for each in side] for side in pair] for pair in draws)
    assert sum(is_longer(*pair) for pair in pairs) < 0.04 * len(draws)


LOG_P = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()


@pytest.mark.parametrize("chosen", range(4))
def test_the_noise_makes_the_choice(chosen):
    rows = LOG_P.expand(1000, -1)
    generator = torch.Generator().manual_seed(chosen)
    uniform = torch.rand(rows.shape, generator=generator)
    noise = noise_given_choice(rows, torch.full((1000,), chosen), uniform)
    assert ((rows + noise).argmax(-1) == chosen).all()


def test_the_noise_of_drawn_choices_is_that_of_free_ones():
    """Over choices that are drawn from p, the noise of each token is a free Gumbel variable.

    Four Kolmogorov-Smirnov tests and one chi-square test, each with a false alarm once in 10,000.
    """
    generator = torch.Generator().manual_seed(5)
    count = 20_000
    chosen = torch.multinomial(LOG_P.exp(), count, replacement=True, generator=generator)
    uniform = torch.rand((count, 4), generator=generator)
    noise = noise_given_choice(LOG_P.expand(count, -1), chosen, uniform)
    for each in noise.T:
        assert kstest(each.double().numpy(), "gumbel_r").pvalue > 1e-4
    other = torch.tensor([0.1, 0.2, 0.3, 0.4])
    drawn = torch.bincount((other.log() + noise).argmax(-1), minlength=4)
    assert chisquare(drawn.numpy(), (other * count).double().numpy()).pvalue > 1e-4
    agreed = ((other.log() + noise).argmax(-1) == chosen).float().mean().item()
    tv = 0.5 * (other - LOG_P.exp()).abs().sum().item()
    assert agreed > (1 - tv) / (1 + tv) - 4 * math.sqrt(0.25 / count)  # the bound of coupling
