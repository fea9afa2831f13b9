"""The identity of a model by all of its files."""

import shutil

import pytest

from specdec.models.weights.fingerprint import model_fingerprint
from specdec.types.errors import UnsupportedModelError


@pytest.fixture
def copy(tiny_model_dir, tmp_path):
    return shutil.copytree(tiny_model_dir, tmp_path / "copy")


def test_a_copy_has_the_same_fingerprint(tiny_model_dir, copy):
    (copy / "README.md").write_text("not a part of the model")
    assert model_fingerprint(copy) == model_fingerprint(tiny_model_dir)
    assert len(model_fingerprint(copy)) == 64


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_change_of_a_file_changes_it(tiny_model_dir, copy, name):
    content = bytearray((copy / name).read_bytes())
    content[-1] ^= 1
    (copy / name).write_bytes(content)
    assert model_fingerprint(copy) != model_fingerprint(tiny_model_dir)


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer.model", "tokenizer_config.json"])
def test_files_that_a_tokenizer_is_made_from_change_it_without_a_tokenizer_json(copy, name):
    def fingerprint(content):
        (copy / name).write_bytes(content)
        return model_fingerprint(copy)

    assert fingerprint(b"a") == fingerprint(b"b")
    (copy / "tokenizer.json").unlink()
    assert fingerprint(b"a") != fingerprint(b"b")


def test_a_directory_without_weights_is_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match="no weights"):
        model_fingerprint(tmp_path)
