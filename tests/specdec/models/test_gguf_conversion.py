"""Conversion of GGUF files to model directories in the cache."""

import os
import shutil
from pathlib import Path

import pytest

from specdec.models import resolve as models_resolve
from specdec.models.resolve import resolve
from specdec.text.tokenizer import Tokenizer
from specdec.types.errors import ModelNotFoundError
from tests.specdec.models.tiny_gguf import write_gguf
from tests.specdec.tiny import tiny_llama_dir


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny_gguf")
    path = directory / "tiny.gguf"
    sizes = {"hidden": 64, "heads": 4, "kv_heads": 2, "intermediate": 96}
    write_gguf(tiny_llama_dir(directory / "hf", **sizes), path)
    return path


def test_a_gguf_file_is_converted_once(
    gguf_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file

    cache, lines = tmp_path / "cache", list[str]()
    mine = Path(shutil.copy(gguf_file, tmp_path / "mine.gguf"))
    model_dir = resolve(str(mine), cache, lines.append)
    assert model_dir.parent == cache / "gguf"
    assert model_dir.name.startswith("mine-")
    assert [line.split()[0] for line in lines] == ["converting", model_dir.name]
    assert capfd.readouterr() == ("", "")
    assert load_file(model_dir / "model.safetensors")["model.norm.weight"].shape == (64,)
    assert Tokenizer(model_dir).encode("2003")

    lines.clear()
    assert resolve(str(mine), cache, lines.append) == model_dir
    assert lines == []
    os.utime(mine, ns=(0, 0))
    assert models_resolve._identity(mine) != model_dir.name
    other = Path(shutil.copy2(mine, tmp_path / "cache" / "mine.gguf"))
    assert models_resolve._identity(other) != models_resolve._identity(mine)


def test_a_file_that_is_not_gguf_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("GGUF, but not really")
    with pytest.raises(ModelNotFoundError, match=r"text\.gguf cannot be converted \(") as caught:
        resolve(str(path), tmp_path / "cache", lambda line: None)
    assert "\n" not in str(caught.value)
    assert [entry.suffix for entry in (tmp_path / "cache" / "gguf").iterdir()] == [".lock"]


def test_a_pipe_is_not_read_as_a_gguf_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelNotFoundError, match="or GGUF file"):
        resolve(str(tmp_path / "pipe.gguf"), tmp_path / "cache", lambda line: None)


def test_a_missing_gguf_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="or GGUF file"):
        resolve(str(tmp_path / "absent.gguf"))
