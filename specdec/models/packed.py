"""Packed checkpoints: small files to ship, which `unpack` turns into a checkpoint of any loader.

A packed directory has `packed.json` and `packed.safetensors` in place of `model.safetensors`:

- Matrices are int8, with a float32 scale for each row in `NAME.scale`, as `quantize_rows` makes
  them; other tensors are as they are.
- Tensors and files that are those of another model, the *base*, are left out: for a draft model the
  target's embedding, output head and tokenizer.

Other files are those of the checkpoint. `specdec.models.resolve` unpacks a directory once, into the
cache, so that nothing else knows of the format.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec.config.engine import DTypeName
from specdec.models.dtypes import DTYPES
from specdec.models.layers.matrix import quantize_rows
from specdec.models.weights.checkpoint import open_checkpoint
from specdec.models.weights.stored_tensors import StoredTensors
from specdec.models.weights.weight_files import find_weight_files
from specdec.types.errors import UnsupportedModelError

PACKED_FILE, PACKED_TENSORS = "packed.json", "packed.safetensors"
_FORMAT = 1
_SCALE = ".scale"


@dataclass(frozen=True)
class Base:
    """The parts of a checkpoint that are those of another model.

    model: its name for `resolve`. tensors, files: names, which are the same in both.
    """

    model: str
    tensors: tuple[str, ...]
    files: tuple[str, ...]

    def read(self, directory: Path, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors by name, from the base's directory.

        Raises UnsupportedModelError where the base does not have one.
        """
        reader = open_checkpoint(directory, dtype)
        return {
            name: reader.read(name, reader.tensors.shape(name)).contiguous()
            for name in self.tensors
        }

    def read_files(self, directory: Path) -> dict[str, bytes]:
        """Return the files by name, from the base's directory. Raises UnsupportedModelError."""
        missing = [name for name in self.files if not (directory / name).is_file()]
        if missing:
            raise UnsupportedModelError(f"the base model {self.model} has no {missing[0]}")
        return {name: (directory / name).read_bytes() for name in self.files}


@dataclass(frozen=True)
class PackedInfo:
    """The content of `packed.json`.

    dtype: of the tensors of the unpacked checkpoint. base: None where it is whole.
    """

    dtype: DTypeName
    base: Base | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the content that `read` reads."""
        return {"format": _FORMAT, **asdict(self)}

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read the file of a directory. Raises UnsupportedModelError."""
        path = directory / PACKED_FILE
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            found, dtype, base = content["format"], content["dtype"], content["base"]
            if found != _FORMAT or dtype not in DTYPES:
                limit = f"format {_FORMAT} with a dtype of {', '.join(DTYPES)}"
                raise UnsupportedModelError(f"{path} has format {found} and {dtype}, not {limit}")
            if base is None:
                return cls(dtype)
            names = {key: tuple(map(_file_name, base[key])) for key in ("tensors", "files")}
            return cls(dtype, Base(str(base["model"]), **names))
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise UnsupportedModelError(f"{path} cannot be read: {error!r}") from error


def pack(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of `packed.safetensors`: matrices in int8, with scales of their rows."""
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and tensor.is_floating_point():
            packed[name], packed[name + _SCALE] = quantize_rows(tensor)
        else:
            packed[name] = tensor.contiguous()
    return packed


def unpack(directory: Path, base: Path | None, output: Path) -> None:
    """Write the checkpoint of a packed directory to `output`, an existing directory.

    base: directory of the base, if it has one. Raises UnsupportedModelError for files that do not
    fit together.
    """
    info = PackedInfo.read(directory)
    dtype = DTYPES[info.dtype]
    tensors = _unpacked(StoredTensors([directory / PACKED_TENSORS], directory), dtype)
    for path in directory.iterdir():
        if path.is_file() and path.name not in (PACKED_FILE, PACKED_TENSORS):
            shutil.copyfile(path, output / path.name)
    if info.base is not None:
        assert base is not None, "a packed checkpoint with a base needs its directory"
        tensors |= info.base.read(base, dtype)
        for name, content in info.base.read_files(base).items():
            (output / name).write_bytes(content)
    weights = output / "model.safetensors"
    save_file(tensors, weights, {"format": "pt"})
    # safetensors creates files for the owner only; a shared cache needs the mode of the umask.
    shutil.copymode(output / "config.json", weights)


def identity(directory: Path, base: Path | None) -> str:
    """Return a name for the unpacked directory, by content, and by path and age of the base."""
    content = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.is_file():
            content.update(f"{path.name}\0".encode())
            with path.open("rb") as file:
                content.update(hashlib.file_digest(file, "sha256").digest())
    for path in find_weight_files(base) if base else ():
        status = path.resolve().stat()
        content.update(f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}".encode())
    return f"{directory.resolve().name}-{content.hexdigest()[:16]}"


def _unpacked(stored: StoredTensors, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors by name; floating-point ones in `dtype`."""
    tensors: dict[str, Tensor] = {}
    for name in stored:
        if name.endswith(_SCALE):
            continue
        tensor = stored.slice(name)
        if name + _SCALE in stored:
            scale = stored.slice(name + _SCALE)
            if tensor.ndim != 2 or scale.shape != tensor.shape[:1]:
                shapes = f"{tuple(tensor.shape)} and {tuple(scale.shape)}"
                raise UnsupportedModelError(f"{name} and its scale have shapes {shapes}")
            tensor = tensor.float() * scale[:, None]
        tensors[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return tensors


def _file_name(name: object) -> str:
    """Return a name of a tensor or a file; raises ValueError for a path to another directory."""
    if not isinstance(name, str) or name != Path(name).name:
        raise ValueError(f"{name!r} is not a name")
    return name
