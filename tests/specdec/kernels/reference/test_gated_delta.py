# Modules: specdec.kernels.reference.recurrent.gated_delta
# Modules: specdec.kernels.reference.recurrent.convolution
# Modules: specdec.kernels.reference.state_pool, specdec.kernels.reference.state_levels
"""The gated delta rule: its two forms are equal, and a row has the same bits in any batch."""

import pytest
import torch
import torch.nn.functional as F

from specdec.kernels.reference import state_pool
from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch
from specdec.kernels.reference.recurrent.convolution import causal_convolution
from specdec.kernels.reference.recurrent.gated_delta import DeltaInputs, run_gated_delta
from specdec.kernels.reference.state_pool import StatePool

WINDOW = 3
TINY, PUBLISHED = (3, 10, 14), (32, 128, 128)


def inputs_of(count, sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    heads, key_dim, value_dim = sizes

    def values(*shape):
        return torch.randn(count, heads, *shape, generator=generator)

    query, key = (F.normalize(values(key_dim), dim=-1) for _ in range(2))
    decay, share = -F.softplus(values()), values().sigmoid()
    return DeltaInputs(query, key, values(value_dim), decay, share)


def run(lengths, sizes, seeds, guesses=0, *, has_delta=True, by_channel=False):
    """Run a row of each length; return their outputs, and the states after them."""
    pool = StatePool(
        1, WINDOW, 1, sizes, num_slots=4, max_guesses=8, dtype=torch.float32, device="cpu"
    )
    pool.memory[0] = torch.stack([torch.full(sizes, 0.1 + index) for index in range(4)])
    chunks = [
        Chunk([0] * length, 0, [0], num_guesses=guesses, state_slot=seed)
        for length, seed in zip(lengths, seeds, strict=True)
    ]
    plan = pool.plan(ForwardBatch(chunks, 4))
    rows = [
        inputs_of(WINDOW + length, sizes, seed) for length, seed in zip(lengths, seeds, strict=True)
    ]
    joined = DeltaInputs(*(torch.cat(parts) for parts in zip(*rows, strict=True)))
    if not has_delta:
        joined = joined._replace(share=None)
    if by_channel:
        factors = torch.linspace(0.2, 3.0, sizes[1])
        joined = joined._replace(decay=joined.decay[..., None] * factors)
    found = run_gated_delta(joined.at(slice(WINDOW, None)), pool.memory[0], plan)
    outputs = found[plan.new_places - WINDOW].split(lengths)
    return outputs, [pool.memory[0, seed].clone() for seed in seeds]


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("has_delta", [False, True])
def test_chunks_equal_the_recurrence(monkeypatch, has_delta, by_channel):
    kind = {"has_delta": has_delta, "by_channel": by_channel}
    chunked, states = run([150], TINY, [1], **kind)
    monkeypatch.setattr(state_pool, "_MAX_RECURRENT_TOKENS", 1000)
    stepped, expected = run([150], TINY, [1], **kind)
    torch.testing.assert_close(chunked[0], stepped[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states[0], expected[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sizes", [TINY, PUBLISHED], ids=["tiny", "published"])
@pytest.mark.parametrize("guesses", [0, 2])
def test_a_row_has_the_same_bits_in_any_batch(sizes, guesses):
    lengths, seeds = [3, 1 + guesses, 40, 5], [2, 0, 1, 3]
    together, states = run(lengths, sizes, seeds, guesses)
    for index, (length, seed) in enumerate(zip(lengths, seeds, strict=True)):
        (alone,), (state,) = run([length], sizes, [seed], guesses)
        assert torch.equal(together[index], alone)
        assert torch.equal(states[index], state)


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_convolution_is_that_of_torch(has_bias):
    generator = torch.Generator().manual_seed(3)
    inputs, weight = (torch.randn(*shape, generator=generator) for shape in ((20, 5), (5, 4)))
    bias = torch.randn(5, generator=generator) if has_bias else None
    expected = F.conv1d(inputs.t()[None], weight[:, None], bias, groups=5)[0].t()
    torch.testing.assert_close(causal_convolution(inputs, weight, bias), expected)
