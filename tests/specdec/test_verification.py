from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.parallel import TensorParallelGroup
from specdec.sampling import SamplingBatch, sample
from specdec.verification import verify_coupled
from tests.specdec.sampling.chi_square import FALSE_ALARM, chi_square_p_value
from tests.specdec.sampling.conftest import one_thread

__all__ = ["one_thread"]  # a fixture that is used by being here

ALONE = TensorParallelGroup()


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
        pytest.param([], [], [], id="no sequences"),
        pytest.param([2**31 - 1, 0], [[2**31 - 1]], [(2**31 - 1, 0)], id="largest id"),
    ],
)
def test_longest_agreeing_prefix_and_one_more(sampled, drafts, expected):
    verified = verify_coupled(torch.tensor(sampled, dtype=torch.int64), drafts)
    assert list(verified) == expected
    assert verified.token_ids.tolist() == [token for tokens in expected for token in tokens]
    assert verified.num_tokens.tolist() == [len(tokens) for tokens in expected]
    assert verified.num_accepted.tolist() == [len(tokens) - 1 for tokens in expected]
    for array in (verified.token_ids, verified.num_tokens, verified.num_accepted):
        assert array.dtype == np.int32


def test_rows_and_drafts_must_fit():
    with pytest.raises(AssertionError):
        verify_coupled(torch.tensor([1, 2, 3]), [[1]])


VOCAB_SIZE = 16
NUM_TRIALS = 20_000
LENGTH = 3


@dataclass(frozen=True)
class Trials:
    token_ids: np.ndarray  # [NUM_TRIALS, LENGTH]
    acceptance_rate: float


def markov_logits(spread: float, seed: int) -> Tensor:
    """Logits of the next token after each token, [VOCAB_SIZE, VOCAB_SIZE]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator) * spread


TARGET = markov_logits(spread=1.5, seed=0)


def draw(logits: Tensor, temperature: float, trials: list[int], positions: list[int]) -> Tensor:
    """Trial i has seed i."""
    count = len(trials)
    batch = SamplingBatch.from_lists(
        temperatures=[temperature] * count,
        top_k=[0] * count,
        top_p=[1.0] * count,
        min_p=[0.0] * count,
        seeds=trials,
        choices=[0] * count,
        positions=positions,
    )
    return sample(logits, batch, ALONE, 0, VOCAB_SIZE)


def generate(target: Tensor, draft: Tensor | None, temperature: float, num_draft: int) -> Trials:
    """Text after token 0 from a model that only sees the last token."""
    texts = [[0] for _ in range(NUM_TRIALS)]
    num_drafted = num_accepted = 0
    while unfinished := [trial for trial, text in enumerate(texts) if len(text) <= LENGTH]:
        positions = [len(texts[trial]) - 1 for trial in unfinished]
        columns = [torch.tensor([texts[trial][-1] for trial in unfinished])]
        for ahead in range(num_draft):
            ahead_positions = [position + ahead for position in positions]
            columns.append(draw(draft[columns[-1]], temperature, unfinished, ahead_positions))
        inputs = torch.stack(columns, dim=1)  # [unfinished, 1 + num_draft]
        sampled = draw(
            target[inputs.flatten()],
            temperature,
            [trial for trial in unfinished for _ in range(1 + num_draft)],
            [position + ahead for position in positions for ahead in range(1 + num_draft)],
        )
        verified = verify_coupled(sampled, inputs[:, 1:].tolist())
        num_drafted += num_draft * len(unfinished)
        num_accepted += int(verified.num_accepted.sum())
        for trial, token_ids in zip(unfinished, verified, strict=True):
            texts[trial].extend(token_ids)
    token_ids = np.array([text[1 : 1 + LENGTH] for text in texts])
    return Trials(token_ids, num_accepted / max(1, num_drafted))


def joint_probs(target: Tensor, temperature: float, place: int) -> np.ndarray:
    """Of the tokens at `place` and after it, [VOCAB_SIZE ** 2]."""
    probs = (target.double() / temperature).softmax(1).numpy()
    before = np.linalg.matrix_power(probs, place + 1)[0]
    return (before[:, None] * probs).flatten()


@pytest.fixture(scope="module", params=[0.6, 1.0])
def temperature(request) -> float:
    return request.param


@pytest.fixture(scope="module")
def plain(temperature) -> Trials:
    """Without speculation."""
    return generate(TARGET, None, temperature, 0)


@pytest.mark.parametrize(
    ("draft", "num_draft", "rates"),
    [
        pytest.param(TARGET + markov_logits(spread=0.3, seed=1), 3, (0.6, 0.99), id="good draft"),
        pytest.param(-TARGET, 1, (0.0, 0.2), id="bad draft"),
    ],
)
def test_output_is_the_targets_whatever_is_drafted(temperature, plain, draft, num_draft, rates):
    trials = generate(TARGET, draft, temperature, num_draft)
    assert np.array_equal(trials.token_ids, plain.token_ids)
    for place in range(LENGTH - 1):
        pairs = trials.token_ids[:, place] * VOCAB_SIZE + trials.token_ids[:, place + 1]
        assert chi_square_p_value(pairs, joint_probs(TARGET, temperature, place)) > FALSE_ALARM
    least, most = rates
    assert least < trials.acceptance_rate < most


def test_the_target_as_its_own_draft_is_always_accepted(temperature):
    assert generate(TARGET, TARGET, temperature, 3).acceptance_rate == 1


@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
def test_acceptance_reaches_the_bound_of_the_paper(spread):
    target = markov_logits(spread=1.5, seed=3)[:1]
    draft = target + markov_logits(spread, seed=4)[:1]
    trials = list(range(NUM_TRIALS))
    accepted = draw(target.expand(NUM_TRIALS, -1), 1.0, trials, [0] * NUM_TRIALS) == draw(
        draft.expand(NUM_TRIALS, -1), 1.0, trials, [0] * NUM_TRIALS
    )
    variation = (target.softmax(1) - draft.softmax(1)).abs().sum().item() / 2
    bound = (1 - variation) / (1 + variation)
    # Six standard errors below the bound: chance gets there once in a billion.
    assert accepted.float().mean().item() > bound - 6 * 0.5 / NUM_TRIALS**0.5


def test_greedy_drafts_are_verified_like_any_other():
    trials = generate(TARGET, TARGET, 0.0, 3)
    text = [0]
    while len(text) <= LENGTH:
        text.append(int(TARGET[text[-1]].argmax()))
    assert (trials.token_ids == text[1:]).all()
    assert trials.acceptance_rate == 1
