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

_DEPTHS = frozenset({"num_heads", "n_predict"})
"""Keys of config.json with the number of draft tokens, in layouts without blocks that fix it."""


class ExportedHead:
    """The files of a head in the layout in which `specdec train` exports it.

    tensors: as stored. settings: the fields of TrainingConfig that the files determine: the method,
    and what their layout fixes of draft tokens and sizes.
    """

    def __init__(self, directory: Path) -> None:
        """Read the files. Raises UnsupportedModelError for those of another method or layout."""
        self._directory = directory
        method = head_method_of(directory)
        if method not in METHODS:
            trained = ", ".join(sorted(METHODS.keys() - {"draft_model"}))
            self._refuse(f"it is {method or 'no head'}; training continues heads of {trained}")
        try:
            config: dict[str, Any] = json.loads((directory / "config.json").read_bytes())
            self.settings = {"method": method, **_sizes(config)}
            self.tensors = load_file(directory / "model.safetensors")
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            self._refuse(repr(error))

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


def _sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Return what a config.json fixes of depth, num_layers and markov_rank of TrainingConfig."""
    found: dict[str, Any] = {}
    for key in _DEPTHS & config.keys():
        found["depth"] = config[key]
    if "block_size" in config:
        found["depth"] = config["block_size"] - (0 if config["sample_from_anchor"] else 1)
        found["num_layers"] = config["transformer_layer_config"]["num_hidden_layers"]
    if "markov_rank" in config:
        found["markov_rank"] = config["markov_rank"]
    return found
