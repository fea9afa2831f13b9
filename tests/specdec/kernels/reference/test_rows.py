"""Row kernels in torch, which are the reference of others."""

import pytest
import torch

from specdec.kernels.backend import KernelBackend, row_kernels
from specdec.kernels.reference.rows import RowKernels, quantize_rows


def test_backends_without_triton_use_torch():
    for backend in (KernelBackend.TORCH, KernelBackend.CPU):
        assert type(row_kernels(backend)) is RowKernels


def test_silu_mul_gates_the_second_half():
    x = torch.tensor([[1.0, -2.0, 3.0, 4.0]])
    gate, up = x[:, :2], x[:, 2:]
    torch.testing.assert_close(RowKernels().silu_mul(x), gate * gate.sigmoid() * up)


def test_add_rms_norm_returns_the_sum_and_its_norm():
    kernels, residual, x = RowKernels(), torch.ones(2, 8), torch.arange(16.0).view(2, 8)
    weight = torch.full((8,), 2.0)
    total, normed = kernels.add_rms_norm(residual, x, weight, 1e-6)
    torch.testing.assert_close(total, x + 1)
    torch.testing.assert_close(normed, kernels.rms_norm(x + 1, weight, 1e-6))
    assert torch.equal(residual, torch.ones(2, 8))


@pytest.mark.parametrize(("dtype", "error"), [(torch.int8, 1 / 254), (torch.float8_e4m3fn, 1 / 16)])
def test_quantized_rows_are_within_half_a_step(dtype, error):
    x = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).half()
    x[1] = 0
    quantized, scales = quantize_rows(x, dtype)
    assert quantized.dtype == dtype
    restored = quantized.float() * scales[:, None]
    largest = x.float().abs().amax(1, keepdim=True)
    assert ((restored - x.float()).abs() <= largest * error + 1e-7).all()
    assert (scales > 0).all()
