# Modules: specdec.config.quantization
"""Quantized matrices: close to unquantized ones, and independent of the batch."""

import pytest
import torch

from specdec.config.engine import has_fbgemm
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.layers.linear import RowParallelLinear
from specdec.models.layers.matrix import FullMatrix, Int8Matrix, quantize_rows
from specdec.models.weights.checkpoint import open_checkpoint
from specdec.types.errors import InvalidValueError, UnsupportedModelError
from tests.specdec.fakes import run_ranks
from tests.specdec.models.layers.matrices import random_tensor, relative_error, rows_with_outliers
from tests.specdec.threads import num_threads


@pytest.mark.parametrize("shape", [(144, 200), (383, 144), (64, 17), (1, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_does_not_depend_on_batch(shape, dtype):
    matrix = Int8Matrix([random_tensor(*shape)], shape)
    x = rows_with_outliers(70, shape[1]).to(dtype)
    base = random_tensor(70, shape[0], seed=2).to(dtype)
    with torch.inference_mode():
        alone = torch.cat([matrix.multiply(row[None]) for row in x])
        added = torch.cat(
            [matrix.multiply_add(b[None], row[None]) for b, row in zip(base, x, strict=True)]
        )
        for size in (2, 3, 4, 5, 8, 16, 31, 70):
            for start in (0, 70 - size):
                part = slice(start, start + size)
                assert torch.equal(matrix.multiply(x[part]), alone[part])
                assert torch.equal(matrix.multiply_add(base[part], x[part]), added[part])


def test_row_does_not_depend_on_number_of_threads():
    matrix = Int8Matrix([random_tensor(3000, 144)], (3000, 144))
    x = rows_with_outliers(33, 144)
    alone = matrix.multiply(x)
    with num_threads(2):
        assert torch.equal(matrix.multiply(x), alone)


def test_products_are_close_to_unquantized_ones():
    weight = random_tensor(200, 144)
    weight[-1] *= 1000  # scales are per channel, so the others are unchanged
    weight[4] = 0
    x, bias = rows_with_outliers(9, 144), random_tensor(200, seed=3)
    full = FullMatrix([weight], (200, 144), torch.float32)
    quantized = Int8Matrix([weight], (200, 144))
    for row in (0, 1, 3):
        found, expected = (each.multiply(x[row : row + 1])[:, :-1] for each in (quantized, full))
        assert relative_error(found, expected) < 0.01
    assert not quantized.multiply(x)[2].any()
    torch.testing.assert_close(
        quantized.multiply_add(bias, x), quantized.multiply(x) + bias, rtol=1e-6, atol=1e-6
    )


def test_seven_bit_activations_without_vnni(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    weight, x = random_tensor(200, 144), random_tensor(9, 144, seed=1)
    expected = x @ weight.t()
    assert relative_error(Int8Matrix([weight], (200, 144)).multiply(x), expected) < 0.01


def test_last_bit_of_input_barely_changes_product():
    matrix, x = Int8Matrix([random_tensor(200, 144)], (200, 144)), random_tensor(99, 144, seed=1)
    moved = x * (1 + 1e-6 * random_tensor(99, 144, seed=2).sign())
    assert relative_error(matrix.multiply(moved), matrix.multiply(x)) < 5e-5


def test_quantization_error_is_at_most_half_a_step():
    weight = random_tensor(50, 33)
    values, scales = quantize_rows(weight)
    assert (values.abs().amax(1) == 127).all()
    assert ((values * scales[:, None] - weight).abs() <= 0.5001 * scales[:, None]).all()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_sum_to_the_full_product(tiny_model_dir, size):
    name, shape = "model.layers.0.mlp.down_proj", (144, 200)
    x, residual = random_tensor(6, 200), random_tensor(6, 144, seed=1)

    def run(group):
        cols = group.share_of(200)
        reader = open_checkpoint(tiny_model_dir, torch.float32, "int8")
        linear = RowParallelLinear(reader, name, shape, cols, group)
        return linear(x[:, cols.start : cols.stop], residual.clone())

    reader = open_checkpoint(tiny_model_dir, torch.float32)
    full = RowParallelLinear(reader, name, shape, range(200), TensorParallelGroup())
    for result in run_ranks(size, run):
        assert relative_error(result - residual, full(x, residual) - residual) < 0.02


def test_unknown_method_is_rejected(tiny_model_dir):
    message = "quantization is 'int3'; it must be one of int8, w8a8, int4, or left out"
    with pytest.raises(InvalidValueError, match=message):
        open_checkpoint(tiny_model_dir, torch.float32, "int3")


@pytest.mark.parametrize(
    ("machine", "flags", "has"),
    [
        ("x86_64", "flags : sse4_2 avx2 fma", True),
        ("x86_64", "flags : sse4_2", False),
        ("AMD64", None, True),
        ("aarch64", None, False),
    ],
)
def test_fbgemm_processor_detection(monkeypatch, tmp_path, machine, flags, has):
    cpu_info = tmp_path / "cpuinfo"
    if flags is not None:
        cpu_info.write_text(flags)
    monkeypatch.setattr("specdec.config.engine.platform.machine", lambda: machine)
    monkeypatch.setattr("specdec.config.engine._CPU_INFO", cpu_info)
    assert has_fbgemm() is has


def test_torch_without_fbgemm_is_rejected(monkeypatch):
    monkeypatch.setattr("specdec.models.layers.matrix._has_fbgemm", lambda: False)
    with pytest.raises(UnsupportedModelError, match="FBGEMM"):
        Int8Matrix([random_tensor(4, 8)], (4, 8))
