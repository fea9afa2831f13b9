# Modules: specdec.sampling.sampling_batch
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.kernels.sample import torch_row_argmax
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.sampling.device.device_sampler import sample_rows
from specdec.sampling.gumbel import CHUNK_TOKENS, NoiseKeys, gumbel_noise
from specdec.sampling.row_ops import RowOps
from specdec.sampling.sampler import sample
from specdec.sampling.sampling_batch import SamplingBatch
from specdec.sampling.vocab_shard import VocabShard
from specdec.types.sharding import partition
from tests.specdec.fakes import run_ranks
from tests.specdec.sampling.chi_square import FALSE_ALARM, chi_square_p_value
from tests.specdec.sampling.sampling_rows import sampling_rows

ALONE = TensorParallelGroup()


def batch_of(
    num_rows: int,
    temperature: float | list[float] = 1.0,
    top_k: int | list[int] = 0,
    top_p: float | list[float] = 1.0,
    min_p: float | list[float] = 0.0,
    seed: int = 7,
) -> SamplingBatch:
    """Make a batch whose row i is output position i of one request."""
    rules = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    return sampling_rows(range(num_rows), seed=seed, **rules)


def random_logits(num_rows: int, vocab_size: int, spread: float = 2.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * spread


def sample_whole(logits: Tensor, batch: SamplingBatch) -> Tensor:
    return RowOps().sample_batch(logits, batch)


def cut_by_sort(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> Tensor:
    """Return log-probabilities relative to the best token's; logits without ties."""
    scores = (logits - logits.amax(1, keepdim=True)) / temperature
    ordered, order = scores.sort(dim=1, descending=True)
    ordered[ordered.exp() < min_p] = -torch.inf
    if top_k:
        ordered[:, top_k:] = -torch.inf
    probs = ordered.double().softmax(1)
    ordered[probs.cumsum(1) - probs >= top_p] = -torch.inf
    return torch.empty_like(scores).scatter_(1, order, ordered)


def argmax_with_all_noise(scores: Tensor, seed: int = 7) -> Tensor:
    """Return the tokens by definition, with the noise of every token of every row."""
    num_rows, vocab_size = scores.shape
    num_chunks = -(-vocab_size // CHUNK_TOKENS)
    positions = torch.arange(num_rows).repeat_interleave(num_chunks)
    keys = NoiseKeys(torch.full_like(positions, seed), torch.zeros_like(positions), positions)
    noise = gumbel_noise(keys, torch.arange(num_chunks).repeat(num_rows))
    return (scores + noise.view(num_rows, -1)[:, :vocab_size]).argmax(1)


CUTS = [
    (1.0, 0, 1.0, 0.0),
    (0.6, 0, 1.0, 0.0),
    (1.0, 20, 1.0, 0.0),
    (1.0, 0, 0.8, 0.0),
    (1.3, 30, 0.7, 0.0),
    (0.8, 0, 1.0, 0.05),
    (1.0, 10, 0.9, 0.02),
    (1.2, 0, 0.6, 0.01),
]


@pytest.mark.parametrize("limits", CUTS, ids=str)
@pytest.mark.parametrize("spread", [0.01, 2.0, 8.0])
@pytest.mark.parametrize("on_host", [True, False])
def test_sample_equals_the_argmax_with_all_noise(limits, spread, on_host):
    logits = random_logits(200, 1000, spread)
    expected = argmax_with_all_noise(cut_by_sort(logits, *limits))
    batch = batch_of(200, *limits)
    found = sample_rows(logits, batch.rules, on_host=on_host)
    assert torch.equal(found.token_ids, expected)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("limits", [(0.0, 0, 1.0, 0.0), *CUTS], ids=str)
@pytest.mark.parametrize("vocab_size", [7, 1000])
def test_any_sharding_gives_the_same_tokens(num_ranks, limits, vocab_size):
    logits = random_logits(100, vocab_size)
    batch = batch_of(100, *limits)
    shares = partition(vocab_size, num_ranks)

    def of_rank(group):
        share = shares[group.rank]
        part = logits[:, share.start : share.stop]
        return sample(part, batch, VocabShard(group, share.start, vocab_size)), group.called

    expected = sample_whole(logits, batch)
    results = run_ranks(num_ranks, of_rank)
    assert all(torch.equal(tokens, expected) for tokens, _ in results)
    assert all(collectives == results[0][1] for _, collectives in results)
    if limits[0] == 0:
        assert results[0][1] == ["all_gather"]


def test_padding_columns_are_ignored():
    logits = random_logits(20, 130)
    logits[:, 100:] = 1000
    batch = batch_of(20, [0.0, 1.0] * 10)
    expected = sample_whole(logits[:, :100], batch)
    assert torch.equal(sample(logits, batch, VocabShard(ALONE, 0, 100)), expected)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_greedy_ties_go_to_the_lowest_token(num_ranks):
    logits = torch.zeros(3, 500)
    logits[0, [40, 300]] = 2
    logits[1, [499, 251]] = 2
    shares = partition(500, num_ranks)

    def of_rank(group):
        share = shares[group.rank]
        part = logits[:, share.start : share.stop]
        return sample(part, batch_of(3, 0.0), VocabShard(group, share.start, 500))

    assert [tokens.tolist() for tokens in run_ranks(num_ranks, of_rank)] == [
        [40, 251, 0]
    ] * num_ranks


def test_mixed_batch_equals_its_rows_alone():
    logits = random_logits(8, 3000)
    temperature = [0.0, 1.0, 0.7, 0.0, 1.5, 1.0, 0.3, 1.0]
    top_k = [5, 0, 10, 0, 0, 50, 1, 0]
    top_p = [0.5, 1.0, 1.0, 1.0, 0.9, 0.8, 1.0, 0.1]
    min_p = [0.5, 0.0, 0.1, 0.0, 0.01, 0.3, 0.0, 0.2]
    together = sample_whole(logits, batch_of(8, temperature, top_k, top_p, min_p))
    for row in range(8):
        rules = {"temperature": temperature[row], "top_k": top_k[row], "top_p": top_p[row]}
        batch = sampling_rows([row], seed=7, min_p=min_p[row], **rules)
        assert sample_whole(logits[row : row + 1], batch).item() == together[row].item()
    assert torch.equal(together[[0, 3, 6]], logits[[0, 3, 6]].argmax(1))


@pytest.mark.parametrize("other", ["seed", "choice", "positions"])
def test_seed_choice_and_position_each_change_the_sample(other):
    fields = {"seed": [1] * 300, "choice": [0] * 300, "positions": list(range(300))}
    logits = torch.zeros(300, 1000)
    first = sample_whole(logits, sampling_rows(**fields))
    fields[other] = [value + 1000 for value in fields[other]]
    second = sample_whole(logits, sampling_rows(**fields))
    # Each of 300 pairs is equal with a chance of 1 / 1000; 10 equal ones have odds of 1e-12.
    assert (first == second).sum() < 10


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_converts_other_float_types(dtype, temperature):
    logits = random_logits(50, 300).to(dtype)
    batch = batch_of(50, temperature, top_p=0.9)
    assert torch.equal(sample_whole(logits, batch), sample_whole(logits.float(), batch))


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-42, 1.0, 100.0])
@pytest.mark.parametrize(
    "limits", [(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.5, 0.0), (3, 0.5, 0.0), (0, 0.5, 0.1)], ids=str
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_nan_logits_give_tokens_in_range(temperature, limits, num_ranks):
    logits = random_logits(7, 150)
    logits[0] = torch.nan
    logits[1] = -torch.inf
    logits[2] = torch.inf
    logits[3, :149] = torch.nan
    logits[4, ::2] = torch.nan
    logits[5, 80] = torch.inf
    shares = partition(150, num_ranks)

    def of_rank(group):
        share = shares[group.rank]
        part = logits[:, share.start : share.stop]
        batch = batch_of(7, temperature, *limits)
        return sample(part, batch, VocabShard(group, share.start, 150))

    for tokens in run_ranks(num_ranks, of_rank):
        assert ((tokens >= 0) & (tokens < 150)).all()
        assert tokens[3] == 149
        assert tokens[4] % 2 == 1
        assert tokens[5] == 80


@pytest.mark.parametrize("temperature", [1e-300, 1e-42, 1e-6])
def test_a_temperature_near_zero_is_greedy(temperature):
    logits = random_logits(50, 2000)
    assert torch.equal(sample_whole(logits, batch_of(50, temperature)), logits.argmax(1))


def test_no_rows():
    assert sample_whole(torch.zeros(0, 10), batch_of(0)).shape == (0,)


def drawn(logits: Tensor, num_draws: int, *limits: float) -> np.ndarray:
    """Return counts of samples from one row of logits, [1, vocab_size]."""
    rows = logits.expand(1000, -1)
    seeds = range(num_draws // len(rows))
    return torch.cat(
        [sample_whole(rows, batch_of(1000, *limits, seed=seed)) for seed in seeds]
    ).numpy()


def target_probs(logits: Tensor, *limits: float) -> np.ndarray:
    return cut_by_sort(logits, *limits).double().softmax(1)[0].numpy()


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize(
    "limits", [(0, 1.0), (10, 1.0), (0, 0.8), (20, 0.9), (0, 1.0, 0.05), (0, 0.9, 0.02)], ids=str
)
def test_distribution_is_the_targets(temperature, limits):
    logits = random_logits(1, 50, spread=1.0)
    tokens = drawn(logits, 20_000, temperature, *limits)
    probs = target_probs(logits, temperature, *limits)
    assert chi_square_p_value(tokens, probs) > FALSE_ALARM


def test_distribution_over_many_chunks_is_the_targets():
    logits = random_logits(1, 4096, spread=1.0)
    tokens = drawn(logits, 41_000, 1.0, 0, 1.0)
    assert chi_square_p_value(tokens, target_probs(logits, 1.0, 0, 1.0)) > FALSE_ALARM


def test_chi_square_detects_a_slightly_wrong_distribution():
    logits = random_logits(1, 50)
    tokens = drawn(logits, 40_000, 1.0, 0, 1.0)
    assert chi_square_p_value(tokens, target_probs(logits, 1.05, 0, 1.0)) < FALSE_ALARM
    assert chi_square_p_value(tokens, target_probs(logits, 1.0, 40, 1.0)) < FALSE_ALARM


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_known_argmax_is_not_computed_again(num_ranks):
    logits = random_logits(4, 100)
    plain = sample_whole(logits, batch_of(4, 0.0))
    shares = partition(100, num_ranks)

    def of_rank(group):
        own = logits[:, shares[group.rank].start : shares[group.rank].stop]
        batch = replace(batch_of(4, 0.0), argmax=torch_row_argmax(own))
        shard = VocabShard(group, shares[group.rank].start, 100)
        return sample(torch.full_like(own, torch.nan), batch, shard)

    assert all(torch.equal(tokens, plain) for tokens in run_ranks(num_ranks, of_rank))
