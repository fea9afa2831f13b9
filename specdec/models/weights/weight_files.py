"""Which files of a directory contain weights, and the types and shapes of the tensors in them.

Reading them from safetensors needs no torch; from pickled files it does.
"""

from __future__ import annotations

import json
import operator
import os
import reprlib
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from specdec.models.weights.tensor_headers import StoredFile, StoredTensor, TensorHeader
from specdec.types.errors import UnsupportedModelError

SAFETENSORS = ".safetensors"
PICKLED = (".bin", ".pt", ".pth")

SAFETENSORS_INDEX = "model.safetensors.index.json"

_NAMES = (
    SAFETENSORS_INDEX,
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_LENGTH_BYTES, _METADATA = 8, "__metadata__"
_NO_HEADER = f"it is no safetensors file, or its header exceeds {_MAX_HEADER_BYTES:,} bytes"
_MAX_DIMENSIONS = 64
_NUM_BITS = {
    **{"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64, "BOOL": 8},
    **{f"{kind}{size}": size for size in (64, 32, 16, 8) for kind in "IU"},
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **{"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4},
}
"""Bits of an element by the names of types in safetensors."""
_CUT = "it was not copied or downloaded completely; fetch it again"


def find_weight_files(directory: Path) -> tuple[Path, ...]:
    """Return the weight files of a directory, all in safetensors or all pickled.

    A standard name of transformers wins; otherwise there must be one file with a suffix of weights.
    Raises UnsupportedModelError without any, or with several.
    """
    for name in _NAMES:
        if (directory / name).is_file():
            return _of_index(directory / name) if name.endswith(".json") else (directory / name,)
    for suffixes in ((SAFETENSORS,), PICKLED):
        found = sorted(path for path in directory.iterdir() if path.suffix in suffixes)
        if len(found) > 1:
            names = ", ".join(path.name for path in found)
            raise UnsupportedModelError(f"{directory} has several weight files: {names}")
        if found:
            return tuple(found)
    raise UnsupportedModelError(f"{directory} has no weights in safetensors, .bin or .pt files")


def safetensors_files(directory: Path) -> tuple[Path, ...]:
    """Return the weight files that a decoder is loaded from.

    Raises as `find_weight_files` does, and UnsupportedModelError for pickled files.
    """
    files = find_weight_files(directory)
    if files[0].suffix != SAFETENSORS:
        raise UnsupportedModelError(f"{directory} has no safetensors weights")
    return files


def read_headers(files: Sequence[Path]) -> dict[str, TensorHeader]:
    """Return the type and the shape of each tensor in `files` by name.

    Raises UnsupportedModelError for a file that cannot be read.
    """
    headers = {
        path: _pickled_headers(path) if path.suffix in PICKLED else read_stored(path)
        for path in files
    }
    return {name: headers[path][name] for name, path in files_of_tensors(headers).items()}


def files_of_tensors(names: Mapping[Path, Iterable[str]]) -> dict[str, Path]:
    """Return the file of each tensor. names: of the tensors in each file of a directory.

    Where several have it, such as shards of another checkpoint, the index beside them decides, and
    the last file has one that it does not name.
    """
    found = defaultdict[str, list[Path]](list)
    for path, own in names.items():
        for name in own:
            found[name].append(path)
    several = {name: paths for name, paths in found.items() if len(paths) > 1}
    assigned = _index_beside(next(iter(names))) if several else {}
    return {
        name: path
        for name, paths in found.items()
        for path in paths
        if name not in several or path.name == _file_name(assigned.get(name, paths[-1].name))
    }


def _index_beside(path: Path) -> Mapping[str, object]:
    """Return the file of each tensor by the index beside a weight file; empty without one."""
    kind = "pytorch_model.bin.index.json" if path.suffix in PICKLED else SAFETENSORS_INDEX
    return _weight_map(path.parent / kind) if (path.parent / kind).is_file() else {}


def indexed_names(index: Path) -> list[str]:
    """Return the names of the files in an index, sorted. Raises UnsupportedModelError."""
    return sorted({_file_name(each) for each in _weight_map(index).values()})


def _weight_map(index: Path) -> Mapping[str, object]:
    """Return the file of each tensor by an index. Raises UnsupportedModelError."""
    try:
        found = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnsupportedModelError(f"{index} is not an index of weight files") from error
    if not isinstance(found, dict):
        raise UnsupportedModelError(f"{index} is not an index of weight files")
    return found


def _file_name(name: object) -> str:
    """Return a name in an index without its folder: another path could be anywhere on the disk."""
    return Path(str(name)).name


def _of_index(index: Path) -> tuple[Path, ...]:
    files = tuple(index.parent / name for name in indexed_names(index))
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise UnsupportedModelError(f"{index} names {missing[0]}, which does not exist")
    return files


def read_stored(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name, in the order of their bytes.

    Raises UnsupportedModelError for a file that cannot be read, and for one whose header does not
    give each tensor the bytes that its type and its shape have, one after the other.
    """
    header, begin, file = _read_safetensors(path)
    try:
        entries = [
            (operator.index(first), operator.index(last), name, str(each["dtype"]), each["shape"])
            for name, each in header.items()
            if name != _METADATA
            for first, last in [each["data_offsets"]]
        ]
        entries.sort()
        found = {
            name: StoredTensor(dtype, tuple(shape), file, begin + first, begin + last)
            for first, last, name, dtype, shape in entries
        }
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{path} has an invalid safetensors header") from error
    end = begin
    for name, each in found.items():
        if fault := _fault_of(each, end):
            raise UnsupportedModelError(f"{path}: tensor {name:.200} has {fault}")
        end = each.end
    if file.size != end:
        reason = _CUT if file.size < end else "bytes follow its last tensor"
        raise UnsupportedModelError(
            f"{path} has {file.size} bytes, and its header describes {end}: {reason}"
        )
    return found


def _fault_of(tensor: StoredTensor, begin: int) -> str:
    """Return what is invalid in a tensor whose bytes must follow `begin`; empty if nothing is."""
    dtype, shape = tensor.dtype, tensor.shape
    are_sizes = all(type(size) is int and 0 <= size < 1 << 63 for size in shape)
    if not are_sizes or len(shape) > _MAX_DIMENSIONS:
        return f"the invalid shape {reprlib.repr(shape)}"
    if dtype not in _NUM_BITS:
        return f"the unknown type {dtype!r:.80}; known: {', '.join(_NUM_BITS)}"
    size, rest = divmod(prod(shape) * _NUM_BITS[dtype], 8)
    if tensor.begin == begin and tensor.end == begin + size and not rest:
        return ""
    if max(tensor.begin.bit_length(), tensor.end.bit_length()) > 63:
        return "data_offsets beyond 2^63"
    return (
        f"the bytes {tensor.begin} to {tensor.end}; it must have {begin} to {begin + size}, as "
        f"{dtype} {list(shape)} after the tensors before it"
    )


def safetensors_header(path: Path) -> Mapping[str, Any]:
    """Return the entries of the tensors at the beginning of a file."""
    return {name: each for name, each in _read_safetensors(path)[0].items() if name != _METADATA}


def _read_safetensors(path: Path) -> tuple[Mapping[str, Any], int, StoredFile]:
    """Return the JSON at the beginning of a file, where the tensors begin, and the file."""
    try:
        with path.open("rb") as file:
            status, length = os.fstat(file.fileno()), file.read(_LENGTH_BYTES)
            total = status.st_size
            (size,) = struct.unpack("<Q", length) if len(length) == _LENGTH_BYTES else (0,)
            if total >= _LENGTH_BYTES and not 0 < size <= _MAX_HEADER_BYTES:
                raise ValueError(_NO_HEADER)
            if not 0 < size <= total - _LENGTH_BYTES:
                raise ValueError(f"it has {total} bytes, and its header would have {size}: {_CUT}")
            header = json.loads(file.read(size))
    except (OSError, struct.error, ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{path} cannot be read as safetensors: {error}") from error
    if not isinstance(header, dict):
        raise UnsupportedModelError(f"{path} has an invalid safetensors header")
    return header, _LENGTH_BYTES + size, StoredFile.of(path, status)


def _pickled_headers(path: Path) -> dict[str, TensorHeader]:
    from specdec.models.weights.pickled_tensors import (  # imports torch
        dtype_name,
        read_pickled,
    )

    return {
        name: TensorHeader(dtype_name(tensor.dtype), tuple(tensor.shape))
        for name, tensor in read_pickled(path).items()
    }
