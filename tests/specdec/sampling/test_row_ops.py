"""Selection of the operations on rows, by the kernels that a rank is loaded with."""

import pytest
import torch

from specdec.kernels.cpu import native_library
from specdec.kernels.reference import triton_availability
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.sampling.row_ops import row_ops_of
from specdec.worker.loading import RankModel, load_target
from tests.specdec.engines import engine_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

requires_native = pytest.mark.skipif(native_library() is None, reason="no C++ compiler")


@pytest.mark.parametrize(
    ("kernels", "device", "expected"),
    [
        ("torch", CPU, "torch"),
        ("torch", CUDA, "torch"),
        ("auto", CUDA, "triton"),
        ("triton", CUDA, "triton"),
        pytest.param("auto", CPU, "cpu", marks=requires_native),
        pytest.param("native", CPU, "cpu", marks=requires_native),
    ],
)
def test_operations_are_those_of_the_kernels(kernels, device, expected, monkeypatch):
    monkeypatch.setattr(triton_availability, "_is_installed", lambda: True)
    assert row_ops_of(kernels, device).name == expected


@requires_native
@pytest.mark.parametrize(("kernels", "expected"), [("torch", "torch"), ("auto", "cpu")])
def test_a_rank_samples_by_its_kernels(tiny_model_dir, kernels, expected):
    config, group = engine_config(0), TensorParallelGroup()
    runner = load_target(RankModel(tiny_model_dir, "float32", config, kernels=kernels), group)
    assert runner._shard.ops.name == expected
