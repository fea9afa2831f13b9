"""Dtypes of the tensors of a checkpoint."""

import pytest
import torch
from safetensors.torch import save_file

from specdec.models.weights.checkpoint import open_checkpoint
from specdec.types.errors import UnsupportedModelError


@pytest.fixture
def directory(tmp_path):
    dtypes = {"a": torch.bfloat16, "b": torch.bfloat16, "c": torch.float16, "d": torch.float32}
    tensors = {name: torch.ones(2, 4, dtype=dtype) for name, dtype in dtypes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("names", "dtype"),
    [
        ("a", torch.bfloat16),
        ("ab", torch.bfloat16),
        ("c", torch.float16),
        ("ac", torch.float32),
        ("ad", torch.float32),
        ("d", torch.float32),
    ],
)
def test_float32_uses_the_common_stored_dtype(directory, names, dtype):
    assert open_checkpoint(directory, torch.float32).exact_dtype(*names) == dtype


@pytest.mark.parametrize("name", ["a", "c", "d"])
def test_other_dtypes_are_unchanged(directory, name):
    assert open_checkpoint(directory, torch.bfloat16).exact_dtype(name) == torch.bfloat16


def test_a_missing_tensor_is_named(directory):
    with pytest.raises(UnsupportedModelError, match="has no tensor e"):
        open_checkpoint(directory, torch.float32).exact_dtype("e")
