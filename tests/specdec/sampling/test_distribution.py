import numpy as np
import pytest
import torch
from torch.nn.functional import pad
from torch.testing import assert_close

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.sampling.distribution import (
    Distribution,
    TopTokens,
    highest_probs,
    scale_by_confidence,
)
from specdec.sampling.gumbel import NoiseKeys, Stream, uniforms
from specdec.sampling.vocab_shard import VocabShard
from tests.specdec.fakes import run_ranks
from tests.specdec.sampling.chi_square import FALSE_ALARM, chi_square_p_value
from tests.specdec.sampling.sampling_rows import sampling_rows

VOCAB_SIZE = 200  # chunks of 64: every boundary between ranks is within one
TEMPERATURES = [0.7, 0.0, 1.3, 1.0]
TOP_K = [0, 5, 0, 20]
TOP_P = [1.0, 0.5, 0.6, 0.9]


def logits_of(num_rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, VOCAB_SIZE, generator=generator) * 2


def batch_of(temperatures=TEMPERATURES, top_k=TOP_K, top_p=TOP_P):
    count = len(temperatures)
    rules = {"temperature": temperatures, "top_k": top_k, "top_p": top_p}
    return sampling_rows([0] * count, seed=range(count), **rules)


def reference(logits):
    """Return the probabilities of one row, by sorting."""
    rows = []
    for row, temperature, top_k, top_p in zip(logits, TEMPERATURES, TOP_K, TOP_P, strict=True):
        probs = (row.double() / (temperature or 1)).softmax(0)
        if temperature:
            order = probs.argsort(descending=True)
            kept = order[: top_k or VOCAB_SIZE]
            shares = probs[kept] / probs[kept].sum()
            kept = kept[: int((shares.cumsum(0) < top_p).sum()) + 1]
            cut = torch.zeros_like(probs)
            cut[kept] = probs[kept]
            probs = cut / cut.sum()
        rows.append(probs)
    return torch.stack(rows)


def on_ranks(size, work):
    """Return the result of `work(shard, own)` on each rank; own: selects its columns."""

    def run(group):
        held = group.share_of(VOCAB_SIZE)
        shard = VocabShard(group, held.start, VOCAB_SIZE)
        return work(shard, lambda tensor: tensor[:, held.start : held.stop])

    return run_ranks(size, run)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_probabilities_equal_the_sorted_reference(size):
    logits = logits_of(4)
    rows = torch.arange(4).repeat_interleave(VOCAB_SIZE)
    tokens = torch.arange(VOCAB_SIZE).repeat(4)

    def probs(shard, own):
        distribution = Distribution.of_logits(own(logits), batch_of(), shard)
        return distribution.probs(rows, tokens).view(4, -1), distribution.entropies()

    expected = reference(logits)
    for found, entropies in on_ranks(size, probs):
        assert_close(found, expected, rtol=1e-5, atol=1e-9)
        assert_close(entropies, torch.special.entr(expected).sum(1), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("count", [3, 64, 150, 500])
def test_top_tokens_have_their_renormalized_probabilities(size, count):
    logits = logits_of(4)
    expected = reference(logits).topk(min(count, VOCAB_SIZE))

    def best(shard, own):
        return Distribution.of_logits(own(logits), batch_of(), shard).top(count)

    for listed in on_ranks(size, best):
        shares = expected.values / expected.values.sum(1, keepdim=True)
        assert_close(listed.probs.double(), shares, rtol=1e-5, atol=1e-9)
        is_possible = shares > 0
        assert torch.equal(listed.token_ids[is_possible], expected.indices[is_possible])
        for row, possible in zip(listed.token_ids, is_possible, strict=True):
            assert len(row[possible].unique()) == possible.sum()


@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_a_row_without_probabilities_returns_some_token(bad):
    logits = logits_of(4)
    logits[2] = bad
    shard = VocabShard(TensorParallelGroup(), 0, VOCAB_SIZE)
    distribution = Distribution.of_logits(logits, batch_of(), shard)
    listed = distribution.top(VOCAB_SIZE)
    assert listed.probs[2].tolist() == [1] + [0] * (VOCAB_SIZE - 1)
    assert ((listed.token_ids >= 0) & (listed.token_ids < VOCAB_SIZE)).all()
    keys = NoiseKeys(torch.arange(4), torch.zeros(4).long(), torch.zeros(4).long())
    assert 0 <= listed.sample(keys)[2] < VOCAB_SIZE
    assert distribution.entropies()[2] == 0


def test_top_tokens_are_sampled_by_their_probabilities():
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    count = 20_000
    listed = TopTokens(torch.tensor([7, 3, 9, 0, 5]).expand(count, -1), probs.expand(count, -1))
    zeros = torch.zeros(count, dtype=torch.int64)
    keys = NoiseKeys(torch.arange(count), zeros, zeros).of_stream(Stream.DRAFT, zeros)
    expected = torch.zeros(10, dtype=torch.float64)
    expected[[7, 3, 9, 0, 5]] = probs.double()
    expected /= expected.sum()
    assert chi_square_p_value(listed.sample(keys).numpy(), expected.numpy()) > FALSE_ALARM


@pytest.mark.parametrize("size", [1, 2, 3])
def test_residual_is_the_distribution_minus_the_weights(size):
    """Weights of the most and the least likely tokens, and one above its probability."""
    logits = logits_of(1, seed=3)
    probs = logits[0].double().softmax(0)
    order = probs.argsort(descending=True)
    taken = torch.cat([order[:3], order[-2:]])
    weights = probs[taken] * torch.tensor([0.5, 1.0, 2.0, 0.9, 1.5])
    left = probs.clone()
    left[taken] = (left[taken] - weights).clamp(min=0)
    count = 4000
    zeros = torch.zeros(count, dtype=torch.int64)
    keys = NoiseKeys(torch.arange(count), zeros, zeros).of_stream(Stream.RECOVERY, zeros)
    own_weights = taken.expand(count, -1), weights.expand(count, -1)

    def drawn(shard, own):
        distribution = Distribution.of_logits(own(logits), batch_of([1.0], [0], [1.0]), shard)
        return distribution.sample_residual(zeros, *own_weights, keys)

    ranks = on_ranks(size, drawn)
    assert all(torch.equal(rank, ranks[0]) for rank in ranks)
    assert chi_square_p_value(ranks[0].numpy(), (left / left.sum()).numpy()) > FALSE_ALARM


def test_an_empty_residual_samples_the_distribution():
    logits = torch.full((1, VOCAB_SIZE), -torch.inf)
    logits[0, 17] = 3.0
    shard = VocabShard(TensorParallelGroup(), 0, VOCAB_SIZE)
    distribution = Distribution.of_logits(logits, batch_of([1.0], [0], [1.0]), shard)
    row = torch.tensor([0])
    taken, weights = torch.tensor([[17]]), torch.ones(1, 1, dtype=torch.float64)
    keys = NoiseKeys(row, row, row)
    assert distribution.sample_residual(row, taken, weights, keys).tolist() == [17]


@pytest.mark.parametrize("size", [1, 2])
def test_confidence_lowers_the_temperature(size):
    logits = logits_of(4)
    batch = batch_of([0.7, 0.0, 1.3, 1.0])
    chosen = np.array([0, 3])

    def scaled(shard, own):
        return scale_by_confidence(own(logits), batch, chosen, shard).params["temperature"]

    peaks = [(logits[row].double() / t).softmax(0).max() for row, t in ((0, 0.7), (3, 1.0))]
    expected = torch.tensor([0.7 * (1 - peaks[0]), 0.0, 1.3, 1.0 * (1 - peaks[1])])
    for temperatures in on_ranks(size, scaled):
        assert_close(torch.from_numpy(temperatures), expected.float(), rtol=1e-5, atol=0)


def test_streams_and_offsets_are_independent():
    zeros = torch.zeros(1000, dtype=torch.int64)
    keys = NoiseKeys(torch.arange(1000), zeros, zeros)
    drawn = [
        uniforms(keys.of_stream(stream, zeros + offset))
        for stream in (Stream.DRAFT, Stream.ACCEPTANCE, Stream.RECOVERY)
        for offset in range(4)
    ]
    drawn.append(uniforms(keys))
    table = torch.stack(drawn)
    assert ((table > 0) & (table < 1)).all()
    assert len(table.flatten().unique()) > 0.999 * table.numel()
    correlations = torch.corrcoef(table) - torch.eye(len(table))
    assert correlations.abs().max() < 6 / 1000**0.5
    assert (table.mean(1) - 0.5).abs().max() < 6 * 0.29 / 1000**0.5


@pytest.mark.parametrize("size", [1, 2, 3])
def test_highest_probability_equals_softmax_on_all_ranks(size):
    logits = logits_of(9)

    def found(group):
        part = group.share_of(VOCAB_SIZE)
        own = logits[:, part.start : part.stop]
        if part.stop == VOCAB_SIZE:
            own = pad(own, (0, 5), value=100.0)  # padding columns
        return highest_probs(own, VocabShard(group, part.start, VOCAB_SIZE))

    ranks = run_ranks(size, found)
    assert all(torch.equal(rank, ranks[0]) for rank in ranks)
    assert_close(ranks[0], logits.double().softmax(1).amax(1), rtol=1e-5, atol=0)
