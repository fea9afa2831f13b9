# Modules: specdec.models.layers.linear
"""Matrices of layers: native against torch, and selection of the kernels."""

from itertools import product

import pytest
import torch

from specdec.kernels.backend import KernelBackend
from specdec.kernels.cpu import MatrixFormat, native_library
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.layers.linear import RowParallelLinear, VocabEmbedding, VocabHead
from specdec.models.layers.matrix import (
    FullMatrix,
    Int8Matrix,
    NativeMatrix,
    make_matrix,
    row_blocks,
)
from specdec.models.weights.checkpoint import open_checkpoint
from specdec.types.errors import InvalidValueError, UnsupportedModelError
from tests.specdec.fakes import run_ranks
from tests.specdec.models.layers.matrices import random_tensor, relative_error, rows_with_outliers

CPU = torch.device("cpu")
HEAD = ("model.embed_tokens.weight", (383, 144), range(100, 200))
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def matrix_of(kernels, weight, dtype=torch.float32, quantization=None, blocks=None):
    return make_matrix(
        [weight] if blocks is None else blocks,
        tuple(weight.shape),
        dtype,
        quantization=quantization,
        backend=KernelBackend.select(kernels, CPU),
    )


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_native_products_equal_torch(dtype):
    weight, x = random_tensor(200, 144).to(dtype), random_tensor(9, 144, seed=1).to(dtype)
    base = random_tensor(9, 200, seed=2).to(dtype)
    native, full = (matrix_of(kernels, weight, dtype) for kernels in ("native", "torch"))
    exact = x.double() @ weight.double().t()
    for found, expected in (
        (native.multiply(x), exact),
        (native.multiply_add(base, x), exact + base.double()),
        (native.multiply_add(base[0], x), exact + base[0].double()),
    ):
        assert found.dtype == dtype
        assert relative_error(found.double(), expected) < TOLERANCES[dtype]
    assert relative_error(full.multiply(x).double(), exact) < 2 * TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_rows_are_unpacked_unchanged(dtype):
    weight = random_tensor(77, 144).to(dtype)
    weight[5, :3] = torch.tensor([float("inf"), -0.0, 1e-7], dtype=dtype)
    indices = torch.tensor([0, 76, 5, 5, 16])
    rows = matrix_of("native", weight, dtype).rows(indices)
    assert rows.dtype == dtype
    assert torch.equal(rows.view(torch.uint8), weight[indices].view(torch.uint8))


@pytest.mark.parametrize("index", [-1, 77])
def test_row_index_out_of_range_is_rejected(index):
    with pytest.raises(IndexError, match="from 0 to 76"):
        matrix_of("native", random_tensor(77, 144)).rows(torch.tensor([3, index]))


def test_native_int8_uses_the_integers_of_torch():
    """Only the quantization of activations differs: torch's has 7 bits without VNNI."""
    weight, x = random_tensor(200, 144), rows_with_outliers(9, 144)
    native, reference = (
        matrix_of(kernels, weight, quantization="int8") for kernels in ("native", "torch")
    )
    limit = 5e-5 * (127 / reference._largest) ** 2  # by the steps of its activations
    for row in (0, 1, 3, 4):
        found, expected = (each.multiply(x[row : row + 1]) for each in (native, reference))
        assert relative_error(found, expected) < limit
    assert not native.multiply(x)[2].any()


@pytest.mark.parametrize(
    ("kernels", "quantization"),
    [*product(["native", "torch"], [None, "int8"]), ("native", "w8a8")],
)
def test_blocks_give_the_same_matrix(kernels, quantization):
    weight, x = random_tensor(200, 144), random_tensor(5, 144, seed=1)
    whole = matrix_of(kernels, weight, quantization=quantization)
    blocks = weight.split([7, 100, 93])
    parts = matrix_of(kernels, weight, quantization=quantization, blocks=blocks)
    assert torch.equal(whole.multiply(x), parts.multiply(x))


def test_kernels_are_selected_by_configuration():
    weight = random_tensor(20, 16)
    for method, kind in ((None, FullMatrix), ("int8", Int8Matrix)):
        assert type(matrix_of("torch", weight, quantization=method)) is kind
    for method in (None, "int8", "w8a8"):
        assert type(matrix_of("native", weight, quantization=method)) is NativeMatrix
    assert type(matrix_of("auto", weight)) is (NativeMatrix if native_library() else FullMatrix)


def test_without_compiler_auto_uses_torch_and_native_is_rejected(monkeypatch):
    monkeypatch.setattr("specdec.kernels.backend.native_library", lambda: None)
    weight = random_tensor(20, 16)
    assert isinstance(matrix_of("auto", weight), FullMatrix)
    with pytest.raises(InvalidValueError, match="kernels is 'native'; it must be auto or torch"):
        matrix_of("native", weight)
    monkeypatch.setattr("specdec.models.layers.matrix.native_library_fault", lambda: "no compiler")
    with pytest.raises(UnsupportedModelError, match="w8a8 needs native kernels: no compiler"):
        matrix_of("auto", weight, quantization="w8a8")


def test_w8a8_needs_native_kernels():
    with pytest.raises(UnsupportedModelError, match="w8a8 needs native kernels: not every rank"):
        matrix_of("torch", random_tensor(20, 16), quantization="w8a8")


@pytest.mark.parametrize(
    ("stored", "in_features", "format_"),
    [
        (torch.bfloat16, 16, MatrixFormat.SHORT_FLOAT32),
        (torch.bfloat16, 15, MatrixFormat.FLOAT32),
        (torch.float16, 15, MatrixFormat.FLOAT16),
    ],
)
def test_float32_checkpoint_in_16_bits_is_stored_in_16_bits(stored, in_features, format_):
    weight = random_tensor(20, in_features).to(stored)
    short = matrix_of("native", weight)
    full = matrix_of("native", weight.float())
    assert short.native.format == format_
    assert full.native.format == MatrixFormat.FLOAT32
    x = random_tensor(3, in_features, seed=1)
    assert torch.equal(short.multiply(x), full.multiply(x))
    rows = short.rows(torch.tensor([3, 19]))
    assert rows.dtype == torch.float32
    assert torch.equal(rows, weight[[3, 19]].float())


def test_row_blocks_are_bounded_and_complete():
    pieces = row_blocks(range(5, 50_000), 1000)
    assert [index for piece in pieces for index in piece] == list(range(5, 50_000))
    assert max(map(len, pieces)) * 1000 <= 2**24
    assert row_blocks(range(2, 4), 2**25) == [range(2, 3), range(3, 4)]


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_unquantized_head_serves_as_tied_embedding(tiny_model_dir, kernels):
    reader = open_checkpoint(
        tiny_model_dir, torch.float32, backend=KernelBackend.select(kernels, CPU)
    )
    table = VocabHead(reader, *HEAD).table
    rows = reader.read(*HEAD)
    embedding = VocabEmbedding(table, HEAD[2], TensorParallelGroup(), torch.float32)
    assert torch.equal(embedding(torch.arange(100)), rows)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_quantized_head_has_no_table(tiny_model_dir, kernels):
    backend = KernelBackend.select(kernels, CPU)
    reader = open_checkpoint(tiny_model_dir, torch.float32, "int8", backend=backend)
    assert VocabHead(reader, *HEAD).table is None


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("quantization", "limit"), [(None, 1e-6), ("int8", 0.02), ("w8a8", 0.02)])
def test_ranks_sum_to_the_full_product(tiny_model_dir, size, quantization, limit):
    name, shape = "model.layers.0.mlp.down_proj", (144, 200)
    x, residual = random_tensor(6, 200), random_tensor(6, 144, seed=1)

    def run(group):
        cols = group.share_of(200)
        backend = KernelBackend.select("native", CPU)
        reader = open_checkpoint(tiny_model_dir, torch.float32, quantization, backend=backend)
        linear = RowParallelLinear(reader, name, shape, cols, group)
        return linear(x[:, cols.start : cols.stop], residual.clone())

    reader = open_checkpoint(tiny_model_dir, torch.float32)
    full = RowParallelLinear(reader, name, shape, range(200), TensorParallelGroup())
    for result in run_ranks(size, run):
        assert relative_error(result - residual, full(x, residual) - residual) < limit


def test_a_product_may_overwrite_its_base():
    """So does a layer with the residual that its norm has made; a bias must stay."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 4, generator=generator)
    x, base = torch.randn(3, 4, generator=generator), torch.randn(3, 6, generator=generator)
    matrix, expected = FullMatrix([weight], (6, 4), torch.float32), base + x @ weight.T
    kept = base.clone()
    torch.testing.assert_close(matrix.multiply_add(base, x), expected)
    assert torch.equal(base, kept)
    matrix.overwrites_base = True
    bias = base[0].clone()
    torch.testing.assert_close(matrix.multiply_add(bias, x), bias + x @ weight.T)
    assert torch.equal(bias, kept[0])
    assert matrix.multiply_add(base, x).data_ptr() == base.data_ptr()
    torch.testing.assert_close(base, expected)
