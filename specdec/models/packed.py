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

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec.models.drafters.packed_info import PACKED_FILE, Base, PackedInfo
from specdec.models.dtypes import DTYPES
from specdec.models.layers.matrix import quantize_rows
from specdec.models.weights.checkpoint import open_checkpoint
from specdec.models.weights.stored_tensors import StoredTensors
from specdec.types.errors import UnsupportedModelError

PACKED_TENSORS = "packed.safetensors"
_SCALE = ".scale"


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
        tensors |= read_base(info.base, base, dtype)
        for name, content in info.base.read_files(base).items():
            (output / name).write_bytes(content)
    weights = output / "model.safetensors"
    save_file(tensors, weights, {"format": "pt"})
    # safetensors creates files for the owner only; a shared cache needs the mode of the umask.
    shutil.copymode(output / "config.json", weights)


def read_base(base: Base, directory: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of a base by name, from its directory.

    Raises UnsupportedModelError where it does not have one.
    """
    reader = open_checkpoint(directory, dtype)
    return {
        name: reader.read(name, reader.tensors.shape(name)).contiguous() for name in base.tensors
    }


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
