import math

import numpy as np
import pytest
import torch
from scipy import stats

from specdec.sampling import gumbel as noise_module
from specdec.sampling.gumbel import (
    CHUNK_TOKENS,
    MAX_NOISE,
    MIN_NOISE,
    NoiseKeys,
    gumbel_noise,
    largest_noise,
)
from tests.specdec.sampling.chi_square import FALSE_ALARM, chi_square_p_value
from tests.specdec.sampling.test_philox import plain_philox


def keys(seeds, choices=0, positions=0) -> NoiseKeys:
    seeds = torch.as_tensor(seeds)
    return NoiseKeys(seeds, torch.full_like(seeds, choices), torch.full_like(seeds, positions))


@pytest.fixture(scope="module")
def many_chunks() -> torch.Tensor:
    """Return the noise of 2,000 chunks of 8 requests, [16000, CHUNK_TOKENS]."""
    seeds = torch.arange(8).repeat_interleave(2000) + 1000
    return gumbel_noise(keys(seeds), torch.arange(2000).repeat(8))


def exponential(bits: int) -> float:
    return -math.log1p(-min((bits + 0.5) / 2**32, 1 - 2**-24))


def documented_noise(seed: int, choice: int, position: int, token: int) -> float:
    key = [seed % 2**32, seed // 2**32]
    chunk = token // CHUNK_TOKENS
    smallest_bits, owner_bits, _, _ = plain_philox([2**31 + chunk, position, choice, 0], key)
    smallest = exponential(smallest_bits) / CHUNK_TOKENS
    if owner_bits * CHUNK_TOKENS // 2**32 == token % CHUNK_TOKENS:
        return -math.log(smallest)
    own_bits = plain_philox([token // 4, position, choice, 0], key)[token % 4]
    return -math.log(smallest + exponential(own_bits))


@pytest.mark.parametrize(
    ("seed", "choice", "position", "chunk"),
    [(0, 0, 0, 0), (2**63 - 1, 0, 0, 1), (12345678901234567, 3, 70000, 2374)],
)
def test_noise_equals_the_documented_function(seed, choice, position, chunk):
    noise = gumbel_noise(keys([seed], choice, position), torch.tensor([chunk]))
    tokens = range(chunk * CHUNK_TOKENS, (chunk + 1) * CHUNK_TOKENS)
    expected = [documented_noise(seed, choice, position, token) for token in tokens]
    np.testing.assert_allclose(noise[0], expected, rtol=1e-5, atol=1e-6)


def test_noise_of_a_chunk_does_not_depend_on_the_batch(monkeypatch, many_chunks):
    monkeypatch.setattr(noise_module, "_CPU_SLAB_COUNTERS", 100)  # slabs of 6 chunks
    chosen = torch.tensor([0, 1, 5, 999, 1999, 3, 700])
    assert torch.equal(gumbel_noise(keys([1000] * 7), chosen), many_chunks[chosen])


def test_each_part_of_the_key_changes_the_noise():
    chunk = torch.tensor([3])
    noise = gumbel_noise(keys([7]), chunk)
    for other in (keys([8]), keys([7 + 2**32]), keys([7], choices=1), keys([7], positions=1)):
        assert not torch.isclose(gumbel_noise(other, chunk), noise).any()
    assert not torch.isclose(gumbel_noise(keys([7]), chunk + 1), noise).any()


def test_largest_noise_is_the_maximum_of_the_chunk(many_chunks):
    seeds = torch.arange(8).repeat_interleave(2000) + 1000
    largest = largest_noise(keys(seeds), torch.arange(2000).repeat(8))
    assert torch.equal(largest.noise, many_chunks.amax(1))
    assert torch.equal(largest.offsets, many_chunks.argmax(1))


# 1,024,000 values: the standard error of the mean is 1.3e-3, of the variance 3.6e-3; the limits
# are six of them, exceeded by chance once in 500 million.
def test_moments(many_chunks):
    assert many_chunks.double().mean().item() == pytest.approx(np.euler_gamma, abs=7.6e-3)
    assert many_chunks.double().var().item() == pytest.approx(math.pi**2 / 6, abs=2.2e-2)


def test_distribution_of_all_tokens_is_gumbel(many_chunks):
    assert stats.kstest(many_chunks.flatten().numpy(), "gumbel_r").pvalue > FALSE_ALARM


@pytest.mark.parametrize("offset", [0, 1, 31, 63])
def test_distribution_of_one_offset_is_gumbel(many_chunks, offset):
    assert stats.kstest(many_chunks[:, offset].numpy(), "gumbel_r").pvalue > FALSE_ALARM


def test_tokens_of_a_chunk_are_independent(many_chunks):
    uniform = np.exp(-np.exp(-many_chunks.double().numpy()))
    correlation = np.corrcoef(uniform.T) - np.eye(CHUNK_TOKENS)
    # 2,016 pairs, each with a standard error of 1 / sqrt(16000).
    assert np.abs(correlation).max() < 6 / math.sqrt(len(uniform))
    ranks = uniform.argsort(1)
    for place in (0, 1, CHUNK_TOKENS - 2, CHUNK_TOKENS - 1):
        p_value = chi_square_p_value(ranks[:, place], np.full(CHUNK_TOKENS, 1 / CHUNK_TOKENS))
        assert p_value > FALSE_ALARM, place
    # The second largest of n independent values does not depend on which is the largest.
    pairs = ranks[:, -1] * CHUNK_TOKENS + ranks[:, -2]
    probs = np.full((CHUNK_TOKENS, CHUNK_TOKENS), 1 / (CHUNK_TOKENS * (CHUNK_TOKENS - 1)))
    np.fill_diagonal(probs, 0)
    coarse = probs.reshape(8, 8, 8, 8).sum((1, 3)).flatten()
    coarse_pairs = pairs // CHUNK_TOKENS // 8 * 8 + pairs % CHUNK_TOKENS // 8
    assert chi_square_p_value(coarse_pairs, coarse) > FALSE_ALARM


def test_order_statistics_of_a_chunk(many_chunks):
    """The k-th smallest of n exponentials is a sum of Exp(1) / n, Exp(1) / (n - 1), ..."""
    arrivals = np.sort(np.exp(-many_chunks.double().numpy()), axis=1)
    gaps = np.diff(arrivals, axis=1, prepend=0) * np.arange(CHUNK_TOKENS, 0, -1)
    for place in (0, 1, 2, CHUNK_TOKENS - 1):
        assert stats.kstest(gaps[:, place], "expon").pvalue > FALSE_ALARM, place


def test_limits(many_chunks):
    bits = torch.tensor([0.0, 2.0**32])
    smallest, largest = noise_module._exponentials_of_bits(bits).double().tolist()
    assert -math.log(smallest / CHUNK_TOKENS) == pytest.approx(MAX_NOISE, rel=1e-6)
    assert -math.log(largest + largest / CHUNK_TOKENS) == pytest.approx(MIN_NOISE, rel=1e-6)
    assert many_chunks.min() >= MIN_NOISE
    assert many_chunks.max() <= MAX_NOISE


def test_no_chunks():
    none = torch.zeros(0, dtype=torch.int64)
    assert gumbel_noise(keys(none), none).shape == (0, CHUNK_TOKENS)
