"""Metadata of packed checkpoints: `packed.json`, and the name of an unpacked directory.

Without torch, which a process that only looks for a model does not need.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from specdec.config.engine import DTYPE_BYTES, DTypeName
from specdec.types.errors import UnsupportedModelError

PACKED_FILE = "packed.json"
_FORMAT = 1


@dataclass(frozen=True)
class Base:
    """The parts of a checkpoint that are those of another model.

    model: its name for `resolve`. tensors, files: names, which are the same in both.
    """

    model: str
    tensors: tuple[str, ...]
    files: tuple[str, ...]

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
            if found != _FORMAT or dtype not in DTYPE_BYTES:
                limit = f"format {_FORMAT} with a dtype of {', '.join(DTYPE_BYTES)}"
                raise UnsupportedModelError(f"{path} has format {found} and {dtype}, not {limit}")
            if base is None:
                return cls(dtype)
            names = {key: tuple(map(_file_name, base[key])) for key in ("tensors", "files")}
            return cls(dtype, Base(str(base["model"]), **names))
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise UnsupportedModelError(f"{path} cannot be read: {error!r}") from error


def identity(directory: Path, base_files: Iterable[Path]) -> str:
    """Return a name for the unpacked directory, by content, and by path and age of base files."""
    content = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.is_file():
            content.update(f"{path.name}\0".encode())
            with path.open("rb") as file:
                content.update(hashlib.file_digest(file, "sha256").digest())
    for path in base_files:
        status = path.resolve().stat()
        content.update(f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}".encode())
    return f"{directory.resolve().name}-{content.hexdigest()[:16]}"


def _file_name(name: object) -> str:
    """Return a name of a tensor or a file; raises ValueError for a path to another directory."""
    if not isinstance(name, str) or name != Path(name).name:
        raise ValueError(f"{name!r} is not a name")
    return name
