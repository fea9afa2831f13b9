"""Dtypes of the tensors of a checkpoint."""

import io
import json

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


class WritesAFile:
    """Object that creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pytorch_model.bin", "no safetensors weights"),
        ("model.pt", "no safetensors weights"),
        ("model.safetensors", "cannot be read"),
    ],
)
def test_pickled_weights_are_not_loaded_under_any_name(tmp_path, name, words):
    torch.save({"a": WritesAFile(tmp_path / "ran")}, tmp_path / name)
    with pytest.raises(UnsupportedModelError, match=words):
        open_checkpoint(tmp_path, torch.float32).exact_dtype("a")
    assert not (tmp_path / "ran").exists()
    torch.load(io.BytesIO((tmp_path / name).read_bytes()), weights_only=False)
    assert (tmp_path / "ran").exists(), "the file would have created it"


def test_an_index_cannot_name_files_outside_the_directory(directory, tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    index = {"weight_map": {"a": "../model.safetensors"}}
    (inside / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedModelError):
        open_checkpoint(inside, torch.float32).exact_dtype("a")
