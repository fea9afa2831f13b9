"""The checks of a GPU's kernels pass in Triton's interpreter."""

import pytest
import torch

from benchmarks.gpu.expert_kernels import _mixture
from benchmarks.gpu.hybrid import check_recurrent_kernels
from benchmarks.gpu.lora_kernels import _updates
from benchmarks.gpu.parts import Context
from specdec.kernels.reference.packed_weight import CodeKind
from tests.specdec.kernels.triton.conftest import products_row_by_row

__all__ = ["products_row_by_row"]  # used by all tests

pytest.importorskip("triton", reason="make test-triton installs it")


@pytest.mark.parametrize("kind", [None, CodeKind.INT4])
def test_experts(kind):
    found = _mixture("small", 40, torch.float32, torch.device("cpu"), kind)
    assert found["passed"], found


def test_lora_updates():
    found = _updates("SmolLM2's output", 16, 18, torch.float32, torch.device("cpu"))
    assert found["passed"], found
    assert found["same_bits_alone"]


def test_recurrent_layers(tmp_path):
    found = check_recurrent_kernels(Context(torch.device("cpu"), tmp_path, is_small=True))
    for dtype in ("float32", "float16"):  # the interpreter rounds to bfloat16 wrongly
        assert found["cases"][dtype]["passed"], found
