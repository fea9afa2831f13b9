# Modules: specdec.kernels.triton.device.gumbel, specdec.kernels.triton.device.logarithm
# Modules: specdec.kernels.triton.device.sample
"""Reference tests: noise, truncation and sampling equal `specdec.sampling`."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from specdec.kernels.sample import torch_row_argmax
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.kernels.triton import sample as kernels
from specdec.kernels.triton.device.gumbel import gumbel_noise, philox
from specdec.kernels.triton.device.logarithm import exponential, log
from specdec.sampling import gumbel
from specdec.sampling.gumbel import LEAST_SCORE
from specdec.sampling.row_ops import RowOps
from tests.specdec.sampling.sampling_rows import sampling_rows

ALONE = TensorParallelGroup()


@triton.jit
def write_logs(x, output, exponentials, N: tl.constexpr):
    places = tl.arange(0, N)
    values = tl.load(x + places)
    tl.store(output + places, log(values))
    tl.store(exponentials + places, exponential(values))


@triton.jit
def write_words(counters, output, k0, k1, N: tl.constexpr):
    places = tl.arange(0, N)
    zeros = tl.zeros([N], tl.uint32)
    c0 = tl.load(counters + places).to(tl.uint32)
    words = philox(
        c0, zeros + 7, zeros + 3, zeros + 0, zeros + k0.to(tl.uint32), zeros + k1.to(tl.uint32)
    )
    for word in tl.static_range(4):
        tl.store(output + word * N + places, words[word].to(tl.int32))


@triton.jit
def write_noise(seeds, choices, positions, first_chunk, output, N: tl.constexpr):
    key = tl.load(seeds), tl.load(choices), tl.load(positions)
    noise = gumbel_noise(first_chunk, key[0], key[1], key[2], N)
    places = tl.arange(0, N)[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(output + places, noise)


def test_logarithms_are_within_one_unit_in_the_last_place():
    generator = torch.Generator().manual_seed(0)
    count = 4096
    x = (torch.rand(count, generator=generator) * 2 - 1).mul(16).exp()  # 1e-7 to 1e7
    x[: count // 2] = torch.rand(count // 2, generator=generator).clamp(2**-33, 1 - 2**-24)
    x[:64] = 2.0 ** -torch.arange(1, 65).clamp(max=33)
    x[64:128] = 1 - 2.0 ** -torch.arange(1, 65).clamp(max=24)
    logs, exponentials = torch.empty(count), torch.empty(count)
    write_logs[(1,)](x, logs, exponentials, count)
    exact = x.double().numpy()
    for found, wanted, chosen in (
        (logs, np.log(exact), slice(None)),
        (exponentials, -np.log1p(-exact[: count // 2]), slice(count // 2)),
    ):
        step = np.spacing(np.abs(wanted).astype(np.float32)).astype(np.float64)
        errors = np.abs(found[chosen].double().numpy() - wanted) / np.maximum(step, 2e-45)
        assert errors.max() < 1.0


def test_random_words_are_those_of_the_reference():
    counters = torch.arange(64, dtype=torch.int32) * 1_000_003
    seed = torch.tensor([-(2**61) + 12345])
    key = gumbel.key_of(seed)
    output = torch.empty(4, 64, dtype=torch.int32)
    low, high = (np.int32(np.uint32(int(word))) for word in key)
    write_words[(1,)](counters, output, int(low), int(high), 64)
    unsigned = counters.long() & 0xFFFFFFFF
    parts = [torch.full((64,), value) for value in (7, 3, 0)]
    words = gumbel.philox4x32(
        gumbel.Words(unsigned, *parts), gumbel.Key(*(w.expand(64) for w in key))
    )
    assert torch.equal(output.long() & 0xFFFFFFFF, torch.stack(words))


@pytest.mark.parametrize(("seed", "choice", "position"), [(0, 0, 0), (-5, 2**32 - 1, 77)])
def test_noise_is_that_of_the_reference_but_for_the_last_place(seed, choice, position):
    batch = batch_of(1, seed=seed, choice=choice, positions=[position])
    chunks = torch.arange(3, 11)
    keys = batch.noise_keys[torch.zeros(8, dtype=torch.int64)]
    expected = gumbel.gumbel_noise(keys, chunks)
    found = torch.empty(8, 64)
    rows = sampling_of(batch)
    write_noise[(1,)](rows.seeds, rows.choices, rows.positions, 3, found, 8)
    assert (found - expected).abs().max() < 4e-6


def batch_of(num_rows, **changes):
    values = {"temperature": 0.8, "seed": range(num_rows), "positions": range(num_rows)}
    return sampling_rows(**{**values, **changes})


def sampling_of(batch):
    return batch.rules.columns


def logits_of(num_rows, vocab, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(num_rows, vocab, generator=generator)).to(dtype)


@pytest.mark.parametrize("vocab", [50, 2048, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_argmax(vocab, dtype):
    logits = logits_of(6, vocab, dtype=dtype)
    logits[1, 7], logits[2, 9], logits[3] = torch.nan, torch.inf, -torch.inf
    logits[4, [3, 40]] = 60.0
    found, expected = kernels.TileArgmax(logits).reduce(), torch_row_argmax(logits)
    assert torch.equal(found.values, expected.values)
    assert torch.equal(found.token_ids, expected.token_ids)
    assert torch.equal(found.has_nan, expected.has_nan)


TRUNCATIONS = [
    {"top_k": [1, 5, 300, 4000]},
    {"top_p": [0.1, 0.5, 0.9, 0.999]},
    {"min_p": [0.5, 0.1, 0.01, 1e-6]},
    {"top_k": [5, 50, 0, 300], "top_p": [0.5, 0.9, 1.0, 0.3], "min_p": [0.0, 0.01, 0.2, 0.0]},
]


def same_tokens(logits, batch, *, truncates=False):
    expected = RowOps().sample_batch(logits, batch)
    found, _ = kernels.sample_rows(logits, sampling_of(batch), LEAST_SCORE, truncates=truncates)
    assert torch.equal(found, expected)


def test_tokens_are_those_of_the_reference():
    temperatures = [0.0, 0.7, 1.0, 0.3]
    same_tokens(logits_of(4, 1000), batch_of(4, temperature=temperatures))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "dtype"),
    [*((limits, torch.float32) for limits in TRUNCATIONS), (TRUNCATIONS[-1], torch.float16)],
)
def test_truncated_tokens_are_those_of_the_reference(limits, dtype):
    same_tokens(logits_of(4, 2500, dtype=dtype), batch_of(4, **limits), truncates=True)


@pytest.mark.slow
def test_tokens_of_many_positions_are_those_of_the_reference():
    logits = logits_of(1, 300).expand(64, -1).contiguous()
    same_tokens(logits, batch_of(64, seed=9))


def test_rows_that_cannot_be_sampled_return_a_token():
    logits = torch.full((2, 100), -torch.inf)
    logits[1] = torch.nan
    tokens, _ = kernels.sample_rows(logits, sampling_of(batch_of(2)), LEAST_SCORE)
    assert ((tokens >= 0) & (tokens < 100)).all()
