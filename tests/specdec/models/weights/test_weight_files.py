# Modules: specdec.models.weights.pickled_tensors
"""Weight files of every kind, and pickles whose code must not run."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specdec.models.weights.stored_tensors import PickledTensors, StoredTensors
from specdec.models.weights.weight_files import find_weight_files, read_headers
from specdec.types.errors import UnsupportedModelError
from tests.specdec.models.weights.test_checkpoint import WritesAFile

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
SHAPES = {"a": (2, 3), "b": (4,)}


def write(path, tensors=TENSORS):
    (save_file if path.suffix == ".safetensors" else torch.save)(tensors, path)


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "pytorch_model.bin", "medusa_lm_head.pt", "hydra.safetensors", "x.pth"],
)
def test_shapes_of_one_file(tmp_path, name):
    write(tmp_path / name)
    files = find_weight_files(tmp_path)
    assert files == (tmp_path / name,)
    assert {name: each.shape for name, each in read_headers(files).items()} == SHAPES


@pytest.mark.parametrize("stem", ["model.safetensors", "pytorch_model.bin"])
def test_files_of_an_index(tmp_path, stem):
    suffix = "." + stem.split(".")[1]
    for name, tensor in TENSORS.items():
        write(tmp_path / f"part-{name}{suffix}", {name: tensor})
    weight_map = {name: f"../part-{name}{suffix}" for name in TENSORS}
    (tmp_path / f"{stem}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    files = find_weight_files(tmp_path)
    assert [path.parent for path in files] == [tmp_path] * 2, "no file outside the directory"
    assert {name: each.shape for name, each in read_headers(files).items()} == SHAPES
    (tmp_path / f"part-a{suffix}").unlink()
    with pytest.raises(UnsupportedModelError, match=r"names part-a.* which does not exist"):
        find_weight_files(tmp_path)


@pytest.mark.parametrize(
    ("stem", "read"),
    [("model.safetensors", StoredTensors), ("pytorch_model.bin", PickledTensors)],
)
@pytest.mark.parametrize("owner", ["part-1", "part-2"])
def test_the_index_decides_about_a_tensor_of_several_files(tmp_path, stem, read, owner):
    suffix = Path(stem).suffix
    for place in (1, 2):
        content = {"a": torch.full((place, 3), float(place)), f"own-{place}": torch.ones(2)}
        write(tmp_path / f"part-{place}{suffix}", content)
    weight_map = {f"own-{place}": f"part-{place}{suffix}" for place in (1, 2)}
    index = tmp_path / f"{stem}.index.json"
    index.write_text(json.dumps({"weight_map": weight_map | {"a": f"{owner}{suffix}"}}))
    files, place = find_weight_files(tmp_path), int(owner[-1])
    shapes = {name: each.shape for name, each in read_headers(files).items()}
    assert shapes == {"a": (place, 3), "own-1": (2,), "own-2": (2,)}
    assert (read(files, tmp_path).slice("a") == place).all()
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert read_headers(files)["a"].shape == (2, 3), "that of the last file"
    assert (read(files, tmp_path).slice("a") == 2).all()


@pytest.mark.parametrize("is_zip", [True, False])
def test_pickled_tensors(tmp_path, is_zip):
    torch.save(TENSORS, tmp_path / "a.bin", _use_new_zipfile_serialization=is_zip)
    source = PickledTensors([tmp_path / "a.bin"], tmp_path)
    assert torch.equal(source.slice("a", slice(1, 2), slice(0, 2)), torch.tensor([[3.0, 4.0]]))
    assert torch.equal(source.slice("b"), TENSORS["b"])
    assert source.shape("a") == (2, 3)
    assert (source.dtype("a"), source.dtype("b")) == ("F32", "BF16")
    assert "c" not in source
    with pytest.raises(UnsupportedModelError, match="has no tensor c"):
        source.slice("c")


@pytest.mark.parametrize("is_zip", [True, False])
def test_code_in_a_pickle_does_not_run(tmp_path, is_zip):
    path = tmp_path / "pytorch_model.bin"
    content = {**TENSORS, "c": WritesAFile(tmp_path / "ran")}
    torch.save(content, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(UnsupportedModelError, match="objects other than tensors"):
        read_headers([path])
    assert not (tmp_path / "ran").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "ran").exists(), "the file would have created it"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([torch.ones(2)], "contains a list; it must map names to tensors"),
        ({"a": 5}, "has a int at 'a'; it must be a tensor"),
        ({"state": {"a": torch.ones(2)}}, "has a dict at 'state'"),
        ({3: torch.ones(2)}, "has a Tensor at 3"),
    ],
)
def test_pickled_content_other_than_named_tensors(tmp_path, content, words):
    torch.save(content, tmp_path / "a.bin")
    with pytest.raises(UnsupportedModelError, match=words):
        read_headers([tmp_path / "a.bin"])


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("name", ["model.safetensors", "model.bin"])
@pytest.mark.parametrize(
    "content",
    [b"", b"x" * 30, pickle.dumps({"a": 1})[:-2], b"\x02\0\0\0\0\0\0\0[]", b"\xff" * 64],
    ids=["empty", "text", "cut", "no-object", "long-header"],
)
def test_unreadable_files(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UnsupportedModelError) as caught:
        read_headers([tmp_path / name])
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)


def test_several_or_no_files_are_rejected(tmp_path):
    with pytest.raises(UnsupportedModelError, match="has no weights"):
        find_weight_files(tmp_path)
    write(tmp_path / "a.pt")
    write(tmp_path / "b.bin")
    with pytest.raises(UnsupportedModelError, match=r"several weight files: a\.pt, b\.bin"):
        find_weight_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(UnsupportedModelError, match="is not an index"):
        find_weight_files(tmp_path)
