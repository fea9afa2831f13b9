"""The tensors of `.bin` and `.pt` files of torch, which are pickles: no code of a file runs.

torch's restricted unpickler accepts tensors and plain containers, and refuses every other object.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from specdec.types.errors import UnsupportedModelError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Types by their names in safetensors."""
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type in safetensors; torch's, where that has none here."""
    return _DTYPE_NAMES.get(dtype, str(dtype))


def read_pickled(path: Path) -> dict[str, Tensor]:
    """Map the tensors of a file to memory, by name.

    Raises UnsupportedModelError if it cannot be read, or contains anything but named tensors.
    """
    try:
        content = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except pickle.UnpicklingError as error:
        raise UnsupportedModelError(
            f"{path} is not loaded: it contains objects other than tensors, whose code would run "
            "(torch.load with weights_only=True refuses it)"
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UnsupportedModelError(f"{path} cannot be read: {reason}") from error
    return dict(_named_tensors(content, path))


def _named_tensors(content: object, path: Path) -> Mapping[str, Tensor]:
    if not isinstance(content, Mapping):
        kind = type(content).__name__
        raise UnsupportedModelError(f"{path} contains a {kind}; it must map names to tensors")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            kind = type(value).__name__
            raise UnsupportedModelError(f"{path} has a {kind} at {name!r}; it must be a tensor")
    return content
