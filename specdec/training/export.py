"""Export of a trained drafter in its published layout, with a card of its making."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from specdec.training.atomic_files import write_atomically
from specdec.training.drafters.base import Drafter


def export(drafter: Drafter, directory: Path, dtype: torch.dtype, card: Mapping[str, Any]) -> None:
    """Write model.safetensors, config.json and card.json; each file is replaced atomically.

    dtype: of the weights in the file.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: _stored(each, dtype) for name, each in drafter.tensors().items()}
    write_atomically(directory / "model.safetensors", save(tensors, {"format": "pt"}))
    config = {**drafter.config(), "torch_dtype": str(dtype).removeprefix("torch.")}
    for name, content in (("config.json", config), ("card.json", card)):
        text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
        write_atomically(directory / name, text.encode())


def _stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    stored = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return stored.contiguous().cpu()
