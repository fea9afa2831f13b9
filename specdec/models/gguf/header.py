"""The header of a GGUF file: metadata, and where each tensor is.

The format is little-endian: the magic bytes, a version, the numbers of tensors and of keys, the
keys with typed values, the descriptions of the tensors, and their data from an aligned offset on.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specdec.types.errors import UnsupportedModelError

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_MAX_KEYS, _MAX_TENSORS, _MAX_DIMENSIONS = 10_000, 100_000, 4
_MAX_PARTS, _MAX_HEADER_BYTES, _MAX_ELEMENTS = 10_000, 2**28, 10_000_000
_DEFAULT_ALIGNMENT = 32
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_CUT = "it ends within its header; it was not copied or downloaded completely; fetch it again"
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class GGUFTensor:
    """Place and type of a tensor. kind: of ggml. offset: of its data, in bytes of the file."""

    path: Path
    shape: tuple[int, ...]  # the last dimension is contiguous, as in torch
    kind: int
    offset: int


@dataclass(frozen=True)
class GGUFHeader:
    """Metadata and tensors of a file, or of all parts of a split one."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor] = field(repr=False)

    @property
    def architecture(self) -> str:
        """The architecture, which is the prefix of its keys."""
        return str(self.metadata.get("general.architecture"))


def read_header(path: Path) -> GGUFHeader:
    """Read the header of a file, and those of the other parts of a split one.

    Raises UnsupportedModelError for a file that is not GGUF, is cut, or is a part of a split one of
    which others are missing.
    """
    first = _read_file(path)
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return first
    tensors = dict(first.tensors)
    for part in _other_parts(path, first.metadata, count):
        tensors.update(_read_file(part).tensors)
    expected = first.metadata.get("split.tensors.count")
    if expected is not None and len(tensors) != expected:
        found = f"its parts have {len(tensors)} tensors, and split.tensors.count is {expected}"
        raise UnsupportedModelError(f"{path.name} is split, but {found}")
    return replace(first, tensors=tensors)


def part_paths(path: Path) -> list[Path]:
    """Return the paths of all parts of a split file by its name; else its own."""
    match = _PART.fullmatch(path.name)
    if match is None or int(match[3]) > _MAX_PARTS:
        return [path]
    names = (f"{match[1]}-{i:05}-of-{match[3]}.gguf" for i in range(1, int(match[3]) + 1))
    return [path.with_name(name) for name in names]


def _other_parts(path: Path, metadata: Mapping[str, Any], count: int) -> list[Path]:
    parts = part_paths(path)
    if metadata.get("split.no", 0) != 0:
        limit = f"the first part, {parts[0].name}, is the model"
        raise UnsupportedModelError(f"{path.name} is part {metadata['split.no'] + 1}: {limit}")
    if len(parts) != count:
        limit = f"NAME-00001-of-{count:05}.gguf, beside its other parts"
        raise UnsupportedModelError(
            f"{path.name} is one of {count} parts; its name must be {limit}"
        )
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise UnsupportedModelError(f"{path.name} is one of {count} parts; {missing[0]} is missing")
    return parts[1:]


def _read_file(path: Path) -> GGUFHeader:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).header()
    except (struct.error, UnicodeDecodeError, ValueError, OverflowError) as error:
        found = f"{path.name} ({path.stat().st_size} bytes) is no whole GGUF file"
        raise UnsupportedModelError(f"{found}: {error}") from error


class _Reader:
    """Cursor over the bytes of a file. Raises ValueError beyond their end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def header(self) -> GGUFHeader:
        if self._take(len(_MAGIC)) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        if (version := self._number("I")) not in _VERSIONS:
            raise ValueError(f"its version is {version}; supported: 2 and 3, little-endian")
        num_tensors = self._count("tensors", _MAX_TENSORS)
        num_keys = self._count("keys", _MAX_KEYS)
        metadata = {self._string(): self._value() for _ in range(num_keys)}
        if len(metadata) != num_keys:
            raise ValueError("it has two keys of the same name")
        descriptions = {self._string(): self._description() for _ in range(num_tensors)}
        if len(descriptions) != num_tensors:
            raise ValueError("it has two tensors of the same name")
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment < 2**31:
            raise ValueError(f"general.alignment is {alignment!r}")
        start = math.ceil(self._at / alignment) * alignment
        tensors = {
            name: replace(each, offset=start + each.offset) for name, each in descriptions.items()
        }
        return GGUFHeader(self._path, metadata, tensors)

    def _description(self) -> GGUFTensor:
        num_dimensions = self._number("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"a tensor has {num_dimensions} dimensions; limit {_MAX_DIMENSIONS}")
        shape = tuple(self._number("Q") for _ in range(num_dimensions))
        kind, offset = self._number("I"), self._number("Q")
        return GGUFTensor(self._path, shape[::-1], kind, offset)

    def _value(self) -> Any:
        kind = self._number("I")
        return self._array() if kind == _ARRAY else self._scalar(kind)

    def _scalar(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind not in _SCALARS:
            raise ValueError(f"a value has the type {kind}")
        return self._number(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, count = self._number("I"), self._count("elements in an array", _MAX_ELEMENTS)
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"an array has elements of the type {kind}")
        layout = f"<{count}{_SCALARS[kind]}"
        return list(struct.unpack(layout, self._take(struct.calcsize(layout))))

    def _string(self) -> str:
        return self._take(self._number("Q")).decode()

    def _count(self, name: str, limit: int) -> int:
        if (count := self._number("Q")) > limit:
            raise ValueError(f"it has {count} {name}; limit {limit}")
        return int(count)

    def _number(self, layout: str) -> Any:
        if self._at + struct.calcsize(f"<{layout}") > len(self._data):
            raise ValueError(_CUT)
        [value] = struct.unpack_from(f"<{layout}", self._data, self._at)
        self._at += struct.calcsize(f"<{layout}")
        return value

    def _take(self, num_bytes: int) -> bytes:
        if num_bytes > len(self._data) - self._at:  # before a copy of the rest of the file
            raise ValueError(_CUT)
        if self._at + num_bytes > _MAX_HEADER_BYTES:
            raise ValueError(f"its header has over {_MAX_HEADER_BYTES} bytes")
        found = self._data[self._at : self._at + num_bytes]
        self._at += num_bytes
        return found
