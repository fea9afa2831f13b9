# Modules: specdec.kernels.reference.recurrent.recurrence
# Modules: specdec.kernels.triton.device.recurrence
"""Kernels of recurrent layers against torch: chunks, replay of accepted drafts, and bits."""

from typing import NamedTuple

import pytest
import torch

from specdec.kernels.backend import KernelBackend, recurrence_kernels
from specdec.kernels.reference.device_states import DeviceStatePool, StateRows
from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch
from specdec.kernels.reference.recurrent.recurrence import (
    DeltaRule,
    HeadNorm,
    InputConvolution,
    LayerStates,
    ScanRule,
)
from specdec.kernels.reference.state_pool import StatePool

WINDOW, NUM_SLOTS, MAX_GUESSES = 3, 4, 8
HEADS, KEYS, KEY_DIM, VALUE_DIM, CHANNELS, STATE_DIM = 4, 2, 5, 6, 70, 3
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES)
LENGTHS = (1, 15, 16, 17, 33)
"""Tokens of chunks, at the borders of the tiles of a convolution."""


class Layer(NamedTuple):
    """A recurrence between its projections. parameters: of a scan, [channels, ...]."""

    num_inputs: int
    memory: tuple[int, ...]
    convolution: InputConvolution
    rule: DeltaRule | ScanRule | None
    parameters: tuple[torch.Tensor, ...] = ()


def random_of(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def convolution_of(channels, dtype, first=0, **options):
    weight = random_of(channels, WINDOW + 1, seed=channels).to(dtype)
    bias = random_of(channels, seed=2).to(dtype) if options.pop("has_bias", False) else None
    return InputConvolution(weight, bias, first, **options)


def rates(*shape):
    return random_of(HEADS, seed=3).exp(), random_of(*shape, seed=4)


def short_convolution(dtype):
    convolution = convolution_of(CHANNELS, dtype, activates=False, has_bias=True)
    return Layer(CHANNELS, (0,), convolution, None)


def gated_delta(dtype):
    keys, values, rows = KEYS * KEY_DIM, HEADS * VALUE_DIM, 2 * HEADS
    rate, bias = rates(HEADS)
    places = {"query": rows, "key": rows + keys, "value": rows + 2 * keys}
    rule = DeltaRule(
        KEYS, 2, KEY_DIM, VALUE_DIM, **places, decay=HEADS, share=0, rate=rate, bias=bias,
        query_scale=KEY_DIM**-0.5, share_scale=2.0,
    )  # fmt: skip
    convolution = convolution_of(2 * keys + values, dtype, rows)
    return Layer(rows + 2 * keys + values, (HEADS, KEY_DIM, VALUE_DIM), convolution, rule)


def kimi_delta(dtype):
    size = HEADS * KEY_DIM
    rate, bias = rates(HEADS, KEY_DIM)
    places = {"query": 0, "key": size, "value": 2 * size, "decay": 3 * size, "share": 4 * size}
    rule = DeltaRule(
        HEADS, 1, KEY_DIM, KEY_DIM, **places, rate=rate, bias=bias, query_scale=KEY_DIM**-0.5
    )
    memory = (HEADS, KEY_DIM, KEY_DIM)
    return Layer(4 * size + HEADS, memory, convolution_of(3 * size, dtype), rule)


def state_space(dtype):
    """Return the layer of a rank whose first head is the third of its groups of two."""
    groups, values = 3 * KEY_DIM, HEADS * VALUE_DIM
    rate, bias = rates(HEADS)
    channels = values + 2 * groups
    rule = DeltaRule(
        3, 2, KEY_DIM, VALUE_DIM, query=values + groups, key=values, value=0, decay=channels,
        share=None, rate=rate, bias=bias, skip=random_of(HEADS, seed=5), first_head=2,
        normalizes=False,
    )  # fmt: skip
    memory = (HEADS, KEY_DIM, VALUE_DIM)
    return Layer(channels + HEADS, memory, convolution_of(channels, dtype, has_bias=True), rule)


def selective_scan(dtype):
    rule = ScanRule(random_of(CHANNELS, STATE_DIM, seed=3).exp(), random_of(CHANNELS, seed=5))
    sizes = (CHANNELS, STATE_DIM, STATE_DIM)
    parameters = tuple(random_of(CHANNELS, size, seed=6 + size) * CHANNELS**-0.5 for size in sizes)
    memory = (CHANNELS, STATE_DIM, 1)
    return Layer(CHANNELS, memory, convolution_of(CHANNELS, dtype), rule, parameters)


LAYERS = (short_convolution, gated_delta, kimi_delta, state_space, selective_scan)
KINDS = pytest.mark.parametrize("make", LAYERS, ids=lambda make: make.__name__)


class Runs:
    """A layer on the kernels of torch or of Triton, and its states."""

    def __init__(self, layer, dtype, *, is_triton=True):
        self.layer, self.dtype, self._is_triton = layer, dtype, is_triton
        self._kernels = recurrence_kernels(
            KernelBackend.TRITON if is_triton else KernelBackend.TORCH
        )
        kind = DeviceStatePool if is_triton else StatePool
        sizes = {"num_slots": NUM_SLOTS, "max_guesses": MAX_GUESSES, "dtype": dtype}
        inputs = layer.num_inputs
        self.pool = kind(1, WINDOW, inputs, layer.memory, **sizes, device=torch.device("cpu"))

    def run(self, chunks, inputs):
        """Return the outputs of a pass; inputs: [T, num_inputs]."""
        batch = ForwardBatch(chunks, 4)
        plan = self.pool.plan_batch(batch) if self._is_triton else self.pool.plan(batch)
        return self.run_plan(plan, inputs)

    def run_plan(self, plan, inputs):
        layer, kernels, states = self.layer, self._kernels, LayerStates(self.pool, 0, plan)
        mixed = kernels.convolve(inputs, layer.convolution, states)
        if layer.rule is None:
            return plan.of_tokens(mixed)
        if isinstance(layer.rule, DeltaRule):
            return kernels.run_delta(mixed, layer.rule, states)
        parameters = [mixed @ each for each in layer.parameters]
        return kernels.run_scan(mixed, *parameters, layer.rule, states)


def chunk(slot, start, length, guesses=0):
    return Chunk([0] * length, start, [0], num_guesses=guesses, state_slot=slot)


def inputs_of(layer, dtype, count, seed=0):
    return random_of(count, layer.num_inputs, seed=seed).to(dtype)


def assert_equal(runs, chunks, inputs, dtype):
    """Run a pass on both kernels; their outputs and states are equal."""
    found, expected = (each.run(chunks, inputs) for each in runs)
    close = {"atol": TOLERANCES[dtype], "rtol": TOLERANCES[dtype]}
    torch.testing.assert_close(found, expected, **close)
    triton, reference = (each.pool for each in runs)
    torch.testing.assert_close(triton.memory, reference.memory, **close)
    assert torch.equal(triton.inputs[:, :, :WINDOW], reference.inputs[:, :, :WINDOW])
    return found


@DTYPES
@KINDS
def test_chunks_of_prompts_equal_torch(make, dtype):
    layer = make(dtype)
    runs = [Runs(layer, dtype, is_triton=is_triton) for is_triton in (True, False)]
    starts = [0] * NUM_SLOTS
    for turn, length in enumerate(LENGTHS):
        others = [(1, 2 + turn), (3, 1)] if turn % 2 else []
        rows = [(0, length), *others]
        chunks = [chunk(slot, starts[slot], count) for slot, count in rows]
        count = sum(each for _, each in rows)
        assert_equal(runs, chunks, inputs_of(layer, dtype, count, turn), dtype)
        for slot, each in rows:
            starts[slot] += each


@DTYPES
@KINDS
def test_accepted_drafts_are_replayed(make, dtype):
    """A row has 0 to 8 of its 8 drafts accepted; the rows beside it have others."""
    layer = make(dtype)
    runs = [Runs(layer, dtype, is_triton=is_triton) for is_triton in (True, False)]
    starts, slots = {2: 0, 0: 0, 3: 0}, (2, 0, 3)
    for turn in range(MAX_GUESSES + 2):
        drafts = {2: MAX_GUESSES, 0: turn % 4, 3: 0}
        chunks = [chunk(slot, starts[slot], 1 + drafts[slot], drafts[slot]) for slot in slots]
        count = sum(len(each.token_ids) for each in chunks)
        assert_equal(runs, chunks, inputs_of(layer, dtype, count, turn), dtype)
        for slot in slots:
            accepted = turn if slot == 2 else turn % 3
            starts[slot] += 1 + min(accepted, drafts[slot])


@KINDS
def test_guesses_of_a_draft_model_commit_nothing(make):
    """Its rows begin at guesses: all before a row are replayed, and the state stays."""
    layer, dtype = make(torch.float32), torch.float32
    runs = [Runs(layer, dtype, is_triton=is_triton) for is_triton in (True, False)]
    assert_equal(runs, [chunk(1, 0, 4, 1)], inputs_of(layer, dtype, 4), dtype)
    memory = runs[0].pool.memory.clone()
    for guess in range(3):
        rows = [chunk(1, 4 + guess, 1, 2 + guess)]
        assert_equal(runs, rows, inputs_of(layer, dtype, 1, guess), dtype)
        assert torch.equal(runs[0].pool.memory, memory)


@DTYPES
@KINDS
def test_a_row_has_the_same_bits_in_any_batch(make, dtype):
    """Beside other rows, with more drafts, and as drafts that are replayed."""
    layer = make(dtype)
    prompt, drafts, last = (inputs_of(layer, dtype, count, count) for count in (9, 4, 1))
    alone, beside = Runs(layer, dtype), Runs(layer, dtype)
    expected = [alone.run([chunk(0, 0, 9)], prompt)]
    expected += [alone.run([chunk(0, 9 + at, 1)], drafts[at : at + 1]) for at in range(3)]
    expected.append(alone.run([chunk(0, 12, 1)], last))
    other = inputs_of(layer, dtype, 5, 77)
    found = [beside.run([chunk(2, 0, 5), chunk(1, 0, 9)], torch.cat([other, prompt]))[5:]]
    found.append(beside.run([chunk(1, 9, 4, 3), chunk(2, 5, 1)], torch.cat([drafts, last]))[:3])
    found.append(beside.run([chunk(2, 6, 5, 4), chunk(1, 12, 1)], torch.cat([other, last]))[5:])
    assert torch.equal(torch.cat(found), torch.cat(expected))
    assert torch.equal(alone.pool.memory[:, 0], beside.pool.memory[:, 1])


@KINDS
def test_rows_of_padding_change_nothing(make):
    """A plan of fixed shape has rows, and tokens after its rows, that are padding."""
    layer, dtype = make(torch.float32), torch.float32
    padded, expected = Runs(layer, dtype), Runs(layer, dtype)
    inputs = inputs_of(layer, dtype, 8)
    own = expected.run([chunk(2, 0, 3, 1)], inputs[2:5])
    for values in (padded.pool.inputs, padded.pool.memory):
        values[:, :2] = 3.0
    columns = ((NUM_SLOTS, 2, NUM_SLOTS), (0, 2, 5), (0, 3, 0), (7, 0, 9), (0, 1, 0))
    plan = padded.pool.plan_rows(StateRows(*map(torch.tensor, columns)), 8)
    found = padded.run_plan(plan, inputs)
    assert torch.equal(found[2:5], own)
    assert not found[:2].any()
    assert not found[5:].any()
    assert torch.equal(padded.pool.memory[:, 2:], expected.pool.memory[:, 2:])
    assert (padded.pool.memory[:, :2] == 3.0).all()
    assert (padded.pool.inputs[:, :2] == 3.0).all()
    assert padded.pool.committed[:NUM_SLOTS].tolist() == [0, 0, 2, 0]


def test_a_sequence_resumes_from_a_snapshot():
    layer, dtype = gated_delta(torch.float32), torch.float32
    runs = Runs(layer, dtype)
    pool = runs.pool
    pool.saved_inputs = pool.inputs.new_zeros(1, 1, WINDOW, layer.num_inputs)
    pool.saved_memory = pool.memory.new_zeros(1, 1, *layer.memory)
    first, rest = inputs_of(layer, dtype, 6), inputs_of(layer, dtype, 2, 1)
    pool.reset(0)
    runs.run([chunk(0, 0, 6)], first)
    pool.save(0, 0, 6)
    expected = runs.run([chunk(0, 6, 2)], rest)
    pool.resume(3, 0, 6)
    assert torch.equal(runs.run([chunk(3, 6, 2)], rest), expected)
    pool.reset(3)
    assert not torch.equal(runs.run([chunk(3, 0, 2)], rest), expected)


@DTYPES
@pytest.mark.parametrize(("rounds", "is_silu"), [(True, True), (False, False)])
def test_gated_norms_equal_torch(dtype, rounds, is_silu):
    found = random_of(3, HEADS, VALUE_DIM)
    gates = random_of(3, 2 * HEADS * VALUE_DIM, seed=2).to(dtype)[:, HEADS * VALUE_DIM :]
    norm = HeadNorm(random_of(VALUE_DIM, seed=3).to(dtype), 1e-5, rounds, is_silu)
    triton, expected = (
        recurrence_kernels(backend).gate_heads(found, gates, norm)
        for backend in (KernelBackend.TRITON, KernelBackend.TORCH)
    )
    torch.testing.assert_close(triton, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
