"""Export of a trained drafter in its published layout, or packed, with a card of its making."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from specdec.models.drafters.packed_info import PACKED_FILE, PackedInfo
from specdec.models.packed import PACKED_TENSORS, pack, read_base
from specdec.training.atomic_files import write_atomically
from specdec.training.data.config import ExportLayout, WeightDtype
from specdec.training.drafters.base import Drafter


def export(
    drafter: Drafter,
    directory: Path,
    dtype: WeightDtype,
    card: Mapping[str, Any],
    layout: ExportLayout = "published",
) -> None:
    """Write weights, config.json, card.json and the drafter's own files.

    dtype: of the weights in the file; in the packed layout, once they are unpacked. Each file is
    replaced atomically.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if layout == "packed":
        _write_packed(drafter, directory, dtype)
    else:
        _write_published(drafter, directory, dtype)
    config = {**drafter.config(), "torch_dtype": dtype}
    for name, content in {**drafter.files(), "config.json": config, "card.json": card}.items():
        write_json(directory / name, content)


def _write_published(drafter: Drafter, directory: Path, dtype: WeightDtype) -> None:
    tensors, shared = _on_host(drafter), drafter.shared()
    if shared is not None:
        tensors |= read_base(shared.base, shared.directory, getattr(torch, dtype))
        for name, content in shared.base.read_files(shared.directory).items():
            write_atomically(directory / name, content)
    write_tensors(directory / "model.safetensors", tensors, getattr(torch, dtype))


def _write_packed(drafter: Drafter, directory: Path, dtype: WeightDtype) -> None:
    shared = drafter.shared()
    info = PackedInfo(dtype, None if shared is None else shared.base)
    # Scales, norms and other vectors are small, and stay as they are.
    write_tensors(directory / PACKED_TENSORS, pack(_on_host(drafter)), torch.float32)
    write_json(directory / PACKED_FILE, info.to_json())


def _on_host(drafter: Drafter) -> dict[str, Tensor]:
    return {name: each.cpu() for name, each in drafter.tensors().items()}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Write tensors in safetensors, floating-point ones in `dtype`; replace the file atomically."""
    stored = {name: _stored(each, dtype) for name, each in tensors.items()}
    write_atomically(path, save(stored, {"format": "pt"}))


def write_json(path: Path, content: Any) -> None:
    """Write JSON; replace the file atomically."""
    indent = 2 if isinstance(content, Mapping) else None
    text = json.dumps(content, ensure_ascii=False, indent=indent) + "\n"
    write_atomically(path, text.encode())


def _stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    stored = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return stored.contiguous()
