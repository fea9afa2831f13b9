# Modules: specdec.kernels.triton.device.rows
"""Reference tests: row kernels equal torch's."""

import pytest
import torch

from specdec.kernels.reference import rows as reference
from specdec.kernels.triton import rows

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3}
TORCH, TRITON = reference.RowKernels(), rows.TritonRowKernels()


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found, expected):
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [576, 64])
def test_rms_norm(size, dtype):
    x, weight = normal(3, size, dtype=dtype), normal(size, dtype=dtype, seed=1)
    close(TRITON.rms_norm(x, weight, 1e-5), TORCH.rms_norm(x, weight, 1e-5))


def test_rms_norm_of_heads_that_are_apart():
    x, weight = normal(5, 6, 32)[:, :4], normal(32, seed=1)
    close(TRITON.rms_norm(x, weight, 1e-5), TORCH.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_add_rms_norm(dtype):
    residual, x = normal(3, 200, dtype=dtype), normal(3, 200, dtype=dtype, seed=1)
    weight = normal(200, dtype=dtype, seed=2)
    found = TRITON.add_rms_norm(residual, x, weight, 1e-5)
    expected = TORCH.add_rms_norm(residual, x, weight, 1e-5)
    assert torch.equal(found[0], expected[0])
    close(found[1], expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [40, 1500])
def test_silu_mul(size, dtype):
    gate_up = 4 * normal(3, 2 * size, dtype=dtype)
    close(TRITON.silu_mul(gate_up), TORCH.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [33, 576])
def test_int8_rows_have_the_integers_of_torch(size, dtype):
    x = normal(4, size, dtype=dtype)
    x[2] = 0
    found, expected = rows.quantize_rows(x, torch.int8), reference.quantize_rows(x, torch.int8)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_fp8_rows_have_the_scales_of_torch():
    """The interpreter drops carries when it rounds to fp8, so values are compared on a GPU only."""
    x, kind = normal(3, 64), torch.float8_e4m3fn
    found, expected = rows.quantize_rows(x, kind), reference.quantize_rows(x, kind)
    assert found[0].dtype == kind
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_the_scale_of_a_row_that_is_not_finite_is_as_with_torch(kind, bad):
    x = normal(3, 64)
    x[1, 5] = bad
    found, expected = (each.quantize_rows(x, kind)[1] for each in (rows, reference))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert found.isfinite().tolist() == [True, False, True]
