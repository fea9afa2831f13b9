"""Weights and draft tokens of an exported head, to go on training it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specdec.models.heads.config import head_method_of
from specdec.training.drafters import METHODS, Drafter
from specdec.types.errors import UnsupportedModelError

_DEPTHS = ("num_heads", "n_predict")
"""Keys of config.json with the number of draft tokens, in layouts that fix it."""


class ExportedHead:
    """The files of a head in the layout in which `specdec train` exports it.

    method: a name in METHODS. tensors: as stored. depth: draft tokens that the layout fixes; None
    if it fixes none.
    """

    def __init__(self, directory: Path) -> None:
        """Read the files. Raises UnsupportedModelError for those of another method or layout."""
        self._directory = directory
        method = head_method_of(directory)
        if method not in METHODS:
            trained = ", ".join(sorted(METHODS))
            self._refuse(f"it is {method or 'no head'}; training continues heads of {trained}")
        self.method: str = method
        try:
            config: dict[str, Any] = json.loads((directory / "config.json").read_bytes())
            self.tensors = load_file(directory / "model.safetensors")
        except (OSError, ValueError, SafetensorError) as error:
            self._refuse(str(error))
        self.depth: int | None = next((config[key] for key in _DEPTHS if key in config), None)

    def token_ids(self, vocab_size: int) -> list[int]:
        """Return the target's id of each draft token. vocab_size: of the target."""
        if "d2t" in self.tensors:
            offsets = self.tensors["d2t"]
            return [int(each) for each in offsets + torch.arange(len(offsets))]
        if "token_map" in self.tensors:
            return [int(each) for each in self.tensors["token_map"]]
        return list(range(vocab_size))

    @torch.no_grad()
    def copy_to(self, drafter: Drafter) -> None:
        """Give a drafter the weights. Raises UnsupportedModelError where they do not fit it."""
        own = drafter.tensors()  # views of the drafter's parameters
        if own.keys() != self.tensors.keys():
            names = sorted(own.keys() ^ self.tensors.keys())
            self._refuse(f"tensor {names[0]} is missing or unknown in the exported layout")
        for name, tensor in own.items():
            self._require_fit(name, tensor)
            if tensor.is_floating_point():
                tensor.copy_(self.tensors[name])

    def _require_fit(self, name: str, tensor: Tensor) -> None:
        stored = self.tensors[name]
        if stored.shape != tensor.shape:
            self._refuse(f"{name} has shape {tuple(stored.shape)}, not {tuple(tensor.shape)}")
        if not tensor.is_floating_point() and not stored.equal(tensor):
            self._refuse(f"{name} does not match the draft tokens")

    def _refuse(self, reason: str) -> NoReturn:
        raise UnsupportedModelError(f"{self._directory} cannot be trained further: {reason}")
