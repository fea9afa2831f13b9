# Modules: specdec.models.packed, specdec.models.drafters.packed_info
"""Packed checkpoints, and their unpacking where a model is resolved."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.models.drafters.packed_info import PACKED_FILE, Base, PackedInfo
from specdec.models.packed import PACKED_TENSORS, pack, unpack
from specdec.models.resolve import portable_name, resolve
from specdec.types.errors import ModelNotFoundError, UnsupportedModelError
from tests.specdec.tiny import tiny_llama_dir

SHARED = "model.embed_tokens.weight"
VALID = '"format": 1, "dtype": "float32"'


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return tiny_llama_dir(tmp_path_factory.mktemp("whole"), layers=1)


@pytest.fixture
def packed(whole, tmp_path):
    """A copy of the tiny model, packed, with the model itself as its base."""
    directory = tmp_path / "packed"
    directory.mkdir()
    shutil.copy(whole / "config.json", directory)
    (directory / "card.json").write_text("{}")
    tensors = load_file(whole / "model.safetensors")
    del tensors[SHARED]
    save_file(pack(tensors), directory / PACKED_TENSORS)
    write_info(directory, Base(str(whole), (SHARED,), ("tokenizer.json",)))
    return directory


def write_info(directory, base, dtype="float32"):
    (directory / PACKED_FILE).write_text(json.dumps(PackedInfo(dtype, base).to_json()))


def silent(line):
    del line


def test_matrices_are_int8_with_a_scale_for_each_row():
    matrix, vector = torch.randn(5, 7), torch.randn(3)
    packed = pack({"a.weight": matrix, "b": vector, "d2t": torch.arange(4)})
    assert packed.keys() == {"a.weight", "a.weight.scale", "b", "d2t"}
    assert packed["a.weight"].dtype == torch.int8
    restored = packed["a.weight"] * packed["a.weight.scale"][:, None]
    assert (restored - matrix).abs().max() <= matrix.abs().max() / 254 + 1e-6
    assert torch.equal(packed["b"], vector)
    assert torch.equal(packed["d2t"], torch.arange(4))


def test_a_packed_model_is_resolved_to_a_whole_one(packed, whole, tmp_path):
    lines = []
    directory = resolve(str(packed), tmp_path / "cache", lines.append)
    assert directory.parent == tmp_path / "cache" / "unpacked"
    found, expected = (load_file(each / "model.safetensors") for each in (directory, whole))
    assert found.keys() == expected.keys()
    assert torch.equal(found[SHARED], expected[SHARED])
    for name, tensor in expected.items():
        limit = tensor.abs().amax(-1, keepdim=True) / 254 + 1e-6 if tensor.ndim == 2 else 0
        assert ((found[name] - tensor).abs() <= limit).all(), name
    names = {path.name for path in directory.iterdir()}
    assert names == {"model.safetensors", "config.json", "card.json", "tokenizer.json"}
    assert lines == [f"{directory.name} is ready in {directory}"]
    assert resolve(str(packed), tmp_path / "cache", pytest.fail) == directory
    # Its files are those of a whole checkpoint, so packing it again loses nothing.
    again = pack({"x": found["model.layers.0.mlp.up_proj.weight"]})
    stored = load_file(packed / PACKED_TENSORS)
    assert torch.equal(again["x"], stored["model.layers.0.mlp.up_proj.weight"])


def test_other_content_has_another_directory(packed, tmp_path):
    first = resolve(str(packed), tmp_path / "cache", silent)
    (packed / "card.json").write_text('{"step": 1}')
    second = resolve(str(packed), tmp_path / "cache", silent)
    assert first != second
    assert (second / "card.json").read_text() == '{"step": 1}'


def test_the_dtype_is_that_of_the_unpacked_tensors(packed, whole, tmp_path):
    write_info(packed, Base(str(whole), (SHARED,), ()), "bfloat16")
    directory = resolve(str(packed), tmp_path / "cache", silent)
    tensors = load_file(directory / "model.safetensors").values()
    assert {each.dtype for each in tensors} == {torch.bfloat16}


def test_a_base_may_be_beside_the_packed_model(packed, whole, tmp_path):
    (tmp_path / "base").symlink_to(whole)
    write_info(packed, Base("../base", (SHARED,), ()))
    assert resolve(str(packed), tmp_path / "cache", silent).is_dir()


def test_without_a_base_nothing_is_added(packed, tmp_path):
    write_info(packed, None)
    output = tmp_path / "output"
    output.mkdir()
    unpack(packed, None, output)
    assert SHARED not in load_file(output / "model.safetensors")


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (Base("/nowhere", (SHARED,), ()), "model '/nowhere' not found"),
        (Base("{whole}", ("lm_head.weight",), ()), "has no tensor lm_head.weight"),
        (Base("{whole}", (SHARED,), ("merges.txt",)), "has no merges.txt"),
    ],
)
def test_a_base_that_does_not_fit_is_one_error(base, message, packed, whole, tmp_path):
    write_info(packed, Base(base.model.format(whole=whole), base.tensors, base.files))
    with pytest.raises(ModelNotFoundError, match=message) as caught:
        resolve(str(packed), tmp_path / "cache", silent)
    assert str(caught.value).startswith(f"{packed} cannot be unpacked: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{",
        '{"format": 2, "dtype": "float32", "base": null}',
        '{"format": 1, "dtype": "int8", "base": null}',
        f'{{{VALID}, "base": {{"model": "a", "tensors": 3, "files": []}}}}',
        f'{{{VALID}, "base": {{"model": "a", "tensors": [], "files": ["../x"]}}}}',
    ],
)
def test_a_file_that_is_not_valid_is_refused(content, tmp_path):
    (tmp_path / PACKED_FILE).write_text(content)
    with pytest.raises(UnsupportedModelError, match=r"packed\.json"):
        PackedInfo.read(tmp_path)


def test_a_portable_name_is_found_from_anywhere(whole, monkeypatch):
    monkeypatch.chdir(whole.parent)
    assert portable_name(whole.name) == str(whole.resolve())
    assert portable_name("smollm2-135m-instruct") == "smollm2-135m-instruct"
    assert portable_name("org/model") == "org/model"
