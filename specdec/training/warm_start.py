"""Weights and draft tokens of an exported head, to train it further."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specdec.config.speculation.methods import head_methods
from specdec.models.heads.config import head_method_of
from specdec.models.weights.fingerprint import weights_fingerprint
from specdec.training.drafters.base import TRAINED_METHODS, Drafter
from specdec.types.errors import UnsupportedModelError

_TENSORS = "model.safetensors"
_OUTPUT_ROWS = frozenset({"lm_head.weight", "markov_head.markov_w2.weight"})
"""Tensors with a row for each draft token."""
_DEPTHS = frozenset({"num_heads", "n_predict"})
"""Keys of config.json with the number of draft tokens, in layouts without blocks that fix it."""


class ExportedHead:
    """The files of a head in the layout in which `specdec train` exports it.

    directory: of the files. tensors: as stored. fingerprint: that of a served head.
    settings: the fields of TrainingConfig that the files determine: the method, and what their
    layout fixes of draft tokens and sizes.
    """

    def __init__(self, directory: Path) -> None:
        """Read the files. Raises UnsupportedModelError for those of another method or layout."""
        self.directory = directory
        method = head_method_of(directory)
        if method not in TRAINED_METHODS:
            trained = ", ".join(sorted(head_methods().keys() & set(TRAINED_METHODS)))
            self._refuse(f"it is {method or 'no head'}; training continues heads of {trained}")
        try:
            config: dict[str, Any] = json.loads((directory / "config.json").read_bytes())
            self.settings = {"method": method, **_sizes(config)}
            self.tensors = load_file(directory / _TENSORS)
            self.fingerprint = weights_fingerprint(directory)
        except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
            self._refuse(repr(error))

    def token_ids(self, vocab_size: int) -> list[int]:
        """Return the target's id of each draft token. vocab_size: of the target."""
        return self._own_token_ids() or list(range(vocab_size))

    def _own_token_ids(self) -> list[int]:
        """Return the ids of a reduced vocabulary; none for the target's own."""
        if "d2t" in self.tensors:
            offsets = self.tensors["d2t"]
            return [int(each) for each in offsets + torch.arange(len(offsets))]
        if "token_map" in self.tensors:
            return [int(each) for each in self.tensors["token_map"]]
        return []

    @property
    def digest(self) -> str:
        """The SHA-256 of the tensors' file."""
        return hashlib.sha256((self.directory / _TENSORS).read_bytes()).hexdigest()

    @torch.no_grad()
    def copy_to(self, drafter: Drafter) -> None:
        """Give a drafter the weights.

        With other draft tokens, the output rows of those that both have are copied. Those of the
        others become what training would have made of them on average (`_fit_rows`). Raises
        UnsupportedModelError where the weights do not fit.
        """
        own = drafter.tensors()  # views of the drafter's parameters
        if own.keys() != self.tensors.keys():
            names = sorted(own.keys() ^ self.tensors.keys())
            self._refuse(f"tensor {names[0]} is missing or unknown in the exported layout")
        rows = self._common_rows(drafter)
        for name, tensor in own.items():
            stored = self.tensors[name]
            if not tensor.is_floating_point():
                continue  # maps of token ids
            if rows is not None and name in _OUTPUT_ROWS:
                places, trained = rows[0].to(tensor.device), stored[rows[1]].to(tensor)
                if len(places):
                    _fit_rows(tensor, places, trained)
                tensor[places] = trained
                continue
            if stored.shape != tensor.shape:
                self._refuse(f"{name} has shape {tuple(stored.shape)}, not {tuple(tensor.shape)}")
            tensor.copy_(stored)

    def _common_rows(self, drafter: Drafter) -> tuple[Tensor, Tensor] | None:
        """Return the rows of the tokens that both have, of the drafter and here; None if equal."""
        stored, wanted = torch.tensor(self._own_token_ids()), drafter.token_ids
        if not len(stored) or stored.equal(wanted):
            return None
        places = torch.searchsorted(stored, wanted).clamp(max=len(stored) - 1)
        own = torch.nonzero(stored[places] == wanted).flatten()
        return own, places[own]

    def _refuse(self, reason: str) -> NoReturn:
        raise UnsupportedModelError(f"{self.directory} cannot be trained further: {reason}")


def _fit_rows(tensor: Tensor, places: Tensor, trained: Tensor) -> None:
    """Scale and shift all rows as the least-squares fit of those at some places to trained ones.

    Training makes the rows of the target's output head shorter, and moves all of them away from
    what is drafted now. Rows without that would be drafted far too often. Rows that begin as zeros,
    those of a Markov head, become the mean of the trained ones. tensor: [V, size], as it begins
    without a head. trained: [R, size].
    """
    before, after = tensor[places].mean(0), trained.mean(0)
    centered = tensor[places] - before
    scale = (centered * (trained - after)).sum() / centered.square().sum().clamp(min=1e-12)
    tensor.sub_(before).mul_(scale).add_(after)


def _sizes(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of TrainingConfig that a config.json fixes."""
    found: dict[str, Any] = {}
    for key in _DEPTHS & config.keys():
        found["depth"] = config[key]
    if "block_size" in config:
        found["depth"] = config["block_size"] - (0 if config["sample_from_anchor"] else 1)
        found["num_layers"] = config["transformer_layer_config"]["num_hidden_layers"]
    if "markov_rank" in config:
        found["markov_rank"] = config["markov_rank"]
        found["markov_head"] = config.get("markov_head_type", "vanilla")
    return found
