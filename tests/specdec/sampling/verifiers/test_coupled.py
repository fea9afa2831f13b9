import numpy as np
import pytest
import torch
from torch.nn.functional import one_hot

from specdec.sampling.sampler import sample
from specdec.sampling.verifiers import Draft
from tests.specdec.sampling.chi_square import FALSE_ALARM, chi_square_p_value
from tests.specdec.sampling.verifiers.trials import (
    Speculation,
    markov,
    random_logits,
    sampling_batch,
    shard_of,
    verified_by,
)

VOCAB_SIZE = 16
NUM_TRIALS = 5_000
NUM_DRAWS = 20_000
"""For the bound of the acceptance, whose draws cost little."""

LENGTH = 3
TARGET = random_logits(VOCAB_SIZE, VOCAB_SIZE, spread=1.5, seed=0)


def verified_greedily(sampled, drafts):
    """Verify drafts with a target whose best tokens are `sampled`."""
    logits = one_hot(torch.tensor(sampled, dtype=torch.int64), 16).float()
    zeros = torch.zeros(len(sampled), dtype=torch.int64)
    own = [Draft(draft) for draft in drafts]
    return verified_by("coupled", logits, sampling_batch(0.0, zeros, zeros), own)


@pytest.mark.parametrize(
    ("sampled", "drafts", "expected"),
    [
        pytest.param([1, 2, 3, 4], [[1, 2, 3]], [(1, 2, 3, 4)], id="full match"),
        pytest.param([1, 2, 3, 4], [[9, 2, 3]], [(1,)], id="first token differs"),
        pytest.param([1, 2, 3, 4], [[1, 9, 3]], [(1, 2)], id="later ones do not count"),
        pytest.param([1, 2, 3, 4], [[1, 2, 9]], [(1, 2, 3)], id="last token differs"),
        pytest.param([1, 2, 3, 4], [[4, 3, 2]], [(1,)], id="several differ"),
        pytest.param([5], [[]], [(5,)], id="no draft"),
        pytest.param([5, 6], [[], []], [(5,), (6,)], id="no drafts at all"),
        pytest.param(
            [1, 2, 3, 4, 5, 6, 7, 8, 9],
            [[1, 2], [], [5], [9, 8]],
            [(1, 2, 3), (4,), (5, 6), (7,)],
            id="ragged",
        ),
    ],
)
def test_the_longest_equal_prefix_is_accepted(sampled, drafts, expected):
    assert verified_greedily(sampled, drafts) == expected


def test_numbers_of_rows_and_drafts_must_match():
    with pytest.raises(IndexError):
        verified_greedily([1, 2], [[1, 2, 3]])


@pytest.fixture(scope="module", params=[0.6, 1.0])
def temperature(request) -> float:
    return request.param


def speculation(draft, temperature, num_draft):
    target = markov(TARGET)
    return Speculation("coupled", target, markov(draft), VOCAB_SIZE, temperature, num_draft)


@pytest.fixture(scope="module")
def plain(temperature):
    """Generate without speculation."""
    return speculation(TARGET, temperature, 0).generate(NUM_TRIALS, LENGTH)


def joint_probs(temperature: float, place: int) -> np.ndarray:
    """Count pairs of tokens at `place` and after it, [VOCAB_SIZE ** 2]."""
    probs = (TARGET.double() / temperature).softmax(1).numpy()
    before = np.linalg.matrix_power(probs, place + 1)[0]
    return (before[:, None] * probs).flatten()


@pytest.mark.parametrize(
    ("draft", "num_draft", "rates"),
    [
        pytest.param(
            TARGET + random_logits(VOCAB_SIZE, VOCAB_SIZE, spread=0.3, seed=1),
            3,
            (0.6, 0.99),
            id="good draft",
        ),
        pytest.param(-TARGET, 1, (0.0, 0.2), id="bad draft"),
    ],
)
def test_output_does_not_depend_on_the_drafts(temperature, plain, draft, num_draft, rates):
    trials = speculation(draft, temperature, num_draft).generate(NUM_TRIALS, LENGTH)
    assert np.array_equal(trials.token_ids, plain.token_ids)
    for place in range(LENGTH - 1):
        pairs = trials.token_ids[:, place] * VOCAB_SIZE + trials.token_ids[:, place + 1]
        assert chi_square_p_value(pairs, joint_probs(temperature, place)) > FALSE_ALARM
    least, most = rates
    assert least < trials.acceptance_rate < most


def test_output_with_only_rejected_drafts_equals_output_without_drafts():
    temperature = 0.6

    def never_right(tokens, positions):
        return one_hot((tokens + 1) % VOCAB_SIZE, VOCAB_SIZE) * 1e4

    target = TARGET.clone()
    places = torch.arange(VOCAB_SIZE)
    target[places, (places + 1) % VOCAB_SIZE] = -1e9
    refused = Speculation("coupled", markov(target), never_right, VOCAB_SIZE, temperature, 3)
    off = Speculation("coupled", markov(target), never_right, VOCAB_SIZE, temperature, 0)
    trials = refused.generate(500, 8)
    assert trials.num_kept == 0
    assert trials.num_drafted == 500 * 8 * 3
    assert np.array_equal(trials.token_ids, off.generate(500, 8).token_ids)


def test_the_target_as_its_own_draft_is_always_accepted(temperature):
    trials = speculation(TARGET, temperature, 3).generate(NUM_TRIALS, LENGTH)
    assert trials.acceptance_rate == 1


@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
def test_acceptance_reaches_the_bound_of_the_paper(spread):
    target = random_logits(1, VOCAB_SIZE, spread=1.5, seed=3)
    draft = target + random_logits(1, VOCAB_SIZE, spread, seed=4)
    seeds = torch.arange(NUM_DRAWS)
    batch, shard = sampling_batch(1.0, seeds, torch.zeros_like(seeds)), shard_of(VOCAB_SIZE)
    drawn, drafted = (
        sample(logits.expand(NUM_DRAWS, -1), batch, shard) for logits in (target, draft)
    )
    variation = (target.softmax(1) - draft.softmax(1)).abs().sum().item() / 2
    bound = (1 - variation) / (1 + variation)
    # Six standard errors below the bound: a false alarm once in a billion.
    accepted = (drawn == drafted).float().mean().item()
    assert accepted > bound - 6 * 0.5 / NUM_DRAWS**0.5


def test_greedy_drafts_are_verified_like_any_other():
    trials = speculation(TARGET, 0.0, 3).generate(1000, LENGTH)
    text = [0]
    while len(text) <= LENGTH:
        text.append(int(TARGET[text[-1]].argmax()))
    assert (trials.token_ids == text[1:]).all()
    assert trials.acceptance_rate == 1
