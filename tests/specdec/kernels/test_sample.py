# Modules: specdec.kernels.reference.sample_rows
"""Reference tests: compiled sampling and argmax against torch, row by row."""

import math

import numpy as np
import pytest
import torch

from specdec.kernels.best_first import best_first
from specdec.kernels.cpu import MatrixFormat, PackedMatrix, native_library
from specdec.kernels.reference.sample_rows import SAMPLE_PARAMS
from specdec.kernels.sample import (
    best_drafts,
    logits_and_argmax,
    row_argmax,
    sample_tokens,
    torch_row_argmax,
)
from specdec.sampling.row_ops import CpuRowOps, RowOps
from tests.combinations import every_value
from tests.specdec.sampling.sampling_rows import sampling_rows
from tests.specdec.threads import num_threads, threads_started_by

pytestmark = pytest.mark.skipif(native_library() is None, reason="no C++ compiler")

NAN, INF = torch.nan, torch.inf
VOCAB_SIZE = 5000


def logits_of(num_rows, vocab_size=VOCAB_SIZE, spread=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * spread


def batch_of(num_rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=3):
    rules = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    choices = [row % 3 for row in range(num_rows)]
    return sampling_rows(range(num_rows), seed=seed * 2**40 + seed, choice=choices, **rules)


def sample(logits, batch):
    return CpuRowOps().sample_batch(logits, batch)


def reference(logits, batch):
    return RowOps().sample_batch(logits, batch)


TRUNCATIONS = {
    "greedy": {"temperature": 0.0},
    "off": {},
    "top_p": {"top_p": 0.9},
    "nearly all": {"top_p": 0.9999},
    "hardly any": {"top_p": 1e-6},
    "top_k": {"top_k": 40},
    "top_k of many": {"top_k": 3000},
    "min_p": {"min_p": 0.02},
    "top_k, then top_p": {"top_k": 100, "top_p": 0.8},
    "min_p, then top_p": {"min_p": 0.01, "top_p": 0.8},
    "min_p within top_k": {"min_p": 0.9, "top_k": 1000},
    "all": {"temperature": 1.7, "min_p": 0.001, "top_k": 200, "top_p": 0.95},
    "hot": {"temperature": 20.0, "top_p": 0.99},
    "cold": {"temperature": 0.05, "top_p": 0.99, "top_k": 50},
    "icy": {"temperature": 1e-30, "top_k": 50},
}


@pytest.mark.parametrize(
    ("truncation", "dtype"),
    every_value(list(TRUNCATIONS), [torch.float32, torch.bfloat16, torch.float16]),
)
def test_samples_equal_reference_and_are_rarely_undecided(truncation, dtype):
    logits, batch = logits_of(150).to(dtype), batch_of(150, **TRUNCATIONS[truncation])
    drawn = torch.from_numpy(sample_tokens(logits, batch.params))
    is_undecided = drawn < 0
    expected = reference(logits.float(), batch)
    assert torch.equal(drawn[~is_undecided], expected[~is_undecided])
    # A row of bfloat16 logits often has equal values; then only the noise differs.
    assert is_undecided.sum() <= 3
    assert torch.equal(sample(logits, batch), expected)


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 64, 65, 1000, 1024, 1025])
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.7}, {"top_k": 5}], ids=str)
def test_any_vocabulary_size(vocab_size, truncation):
    logits, batch = logits_of(64, vocab_size), batch_of(64, **truncation)
    drawn = torch.from_numpy(sample_tokens(logits, batch.params))
    assert torch.equal(drawn, reference(logits, batch))


def test_threshold_within_rounding_error_is_left_to_reference():
    logits = torch.full((40, 128), -INF)
    logits[:, 3] = 0.0
    logits[:, [70, 90]] = -0.75
    first_alone = 1 / (1 + 2 * math.exp(-0.75))  # of the mass, so rounding decides on the second
    batch = batch_of(40, top_p=first_alone)
    assert (sample_tokens(logits, batch.params) == -1).all()
    assert torch.equal(sample(logits, batch), reference(logits, batch))


def test_rows_of_nan_and_infinities():
    logits = logits_of(6, 150)
    logits[0] = NAN
    logits[1] = -INF
    logits[2] = INF
    logits[3, :149] = NAN
    logits[4] = 0.0
    logits[5, 1:] = -INF
    for truncation in TRUNCATIONS.values():
        batch = batch_of(6, **truncation)
        assert torch.equal(sample(logits, batch), reference(logits, batch))


def test_mask_that_leaves_fewer_tokens_than_top_k():
    logits = torch.full((200, VOCAB_SIZE), -INF)
    logits[:, [7, 300, 4999]] = logits_of(200, 3, spread=1.0)
    batch = batch_of(200, top_k=50)
    assert torch.equal(
        torch.from_numpy(sample_tokens(logits, batch.params)), reference(logits, batch)
    )


def test_only_selected_rows_are_sampled():
    logits, batch = logits_of(10), batch_of(10, top_p=0.9)
    params = batch.params[[7, 2]]
    assert sample_tokens(logits, params).tolist() == reference(logits, batch)[[7, 2]].tolist()


def test_strided_and_transposed_rows():
    logits, batch = logits_of(10, 2 * VOCAB_SIZE), batch_of(10, top_p=0.9)
    for view in (logits[:, :VOCAB_SIZE], logits[:, :VOCAB_SIZE].t().contiguous().t()):
        drawn = torch.from_numpy(sample_tokens(view, batch.params))
        assert torch.equal(drawn, reference(logits[:, :VOCAB_SIZE].contiguous(), batch))
        assert torch.equal(row_argmax(view).token_ids, logits[:, :VOCAB_SIZE].argmax(1))


def test_records_of_another_dtype_are_rejected():
    with pytest.raises(AssertionError):
        sample_tokens(logits_of(1), np.zeros(1, dtype=SAMPLE_PARAMS.descr[:-1]))


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 64, 100, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_argmax_equals_reference(vocab_size, dtype):
    logits = logits_of(50, vocab_size).round()  # ties
    logits[::5, vocab_size // 2] = NAN
    logits[::7, -1] = INF
    logits[::11, 0] = -INF
    logits[3] = -INF
    logits[4] = NAN
    logits = logits.to(dtype)
    argmax, expected = row_argmax(logits), torch_row_argmax(logits)
    assert torch.equal(argmax.values, expected.values)
    assert torch.equal(argmax.token_ids, expected.token_ids)
    assert torch.equal(argmax.has_nan, expected.has_nan)


@pytest.mark.parametrize("weights", [MatrixFormat.FLOAT32, MatrixFormat.BFLOAT16])
@pytest.mark.parametrize("num_rows", [1, 9, 40])
def test_fused_logits_and_argmax(weights, num_rows):
    dtype = torch.float32 if weights == MatrixFormat.FLOAT32 else torch.bfloat16
    head = PackedMatrix(native_library(), weights, (VOCAB_SIZE, 48))
    head.pack(0, logits_of(VOCAB_SIZE, 48).to(dtype))
    wide = logits_of(num_rows, 60, seed=1)
    hidden = wide[:, 5:53]
    hidden[-1, 3] = NAN
    expected = torch.empty(num_rows, VOCAB_SIZE)
    head.multiply(hidden, expected)
    for count in (1, 2, 5):
        with num_threads(count):
            logits, argmax = logits_and_argmax(head.struct, hidden)
        assert torch.equal(logits[:-1], expected[:-1])
        found = row_argmax(expected)
        assert torch.equal(argmax.values, found.values)
        assert torch.equal(argmax.token_ids, found.token_ids)
        assert argmax.invalid_rows == [False] * (num_rows - 1) + [True]


@pytest.mark.parametrize("count", [2, 5])
def test_result_does_not_depend_on_number_of_threads(count):
    logits, batch = logits_of(9), batch_of(9, **TRUNCATIONS["all"])
    drawn, argmax = sample_tokens(logits, batch.params).tolist(), row_argmax(logits)
    with num_threads(count):
        assert sample_tokens(logits, batch.params).tolist() == drawn
        again = row_argmax(logits)
    assert torch.equal(again.values, argmax.values)
    assert torch.equal(again.token_ids, argmax.token_ids)


ROWS, TREE = torch.zeros(8, 64), torch.zeros(8, 2, 2, dtype=torch.float64)
PARAMS = np.ones(8, SAMPLE_PARAMS)


@pytest.mark.parametrize(
    "call",
    [
        lambda: row_argmax(ROWS),
        lambda: sample_tokens(ROWS, PARAMS),
        lambda: best_drafts(ROWS, torch.arange(64, dtype=torch.int32), PARAMS, 2),
        lambda: best_first(TREE, torch.ones(8, dtype=torch.int64), 2),
    ],
    ids=["argmax", "sample", "best_drafts", "best_first"],
)
def test_kernels_use_as_many_threads_as_torch_in_a_new_thread(call):
    with num_threads(3):
        assert len(threads_started_by(call)) == 2, "beside the new thread"


def test_argmax_with_replaced_rows():
    logits = logits_of(5)
    before = row_argmax(logits)
    logits[[1, 3]] = logits_of(2, seed=1)
    after, expected = before.with_rows([1, 3], row_argmax(logits[[1, 3]])), row_argmax(logits)
    assert torch.equal(after.values, expected.values)
    assert torch.equal(after.token_ids, expected.token_ids)
    rows = torch.tensor([4, 1])
    assert torch.equal(after.take(rows).token_ids, expected.token_ids[rows])
