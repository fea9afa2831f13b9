"""Training of an adapter of a head (LoRA, Hu et al. 2021): the head stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from specdec.models.lora.peft import CONFIG_FILE, HEAD_KEY, PREFIX, WEIGHT_FILES
from specdec.training.data.config import WeightDtype
from specdec.training.drafters.base import Drafter
from specdec.training.export import write_json, write_tensors
from specdec.training.optimizers import is_outer
from specdec.training.warm_start import ExportedHead


class LowRank(nn.Module):
    """A frozen weight W with the update B A, which is zero at first."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        out_features, in_features = weight.shape
        down = torch.randn(rank, in_features) / in_features**0.5
        self.down = nn.Parameter(down.to(weight.device))
        self.up = nn.Parameter(torch.zeros(out_features, rank, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        """Return the updated weight, [out_features, in_features]."""
        return weight + self.up @ self.down


class HeadAdapter:
    """An adapter of a drafter's linear layers, which alone is trained from now on."""

    def __init__(self, drafter: Drafter, start: ExportedHead, rank: int) -> None:
        """Freeze the drafter, which has the weights of `start`; draw A from torch's generator."""
        self._start, self._rank = start, rank
        published = {
            tensor.data_ptr(): name.removesuffix(".weight")
            for name, tensor in drafter.tensors().items()
        }
        drafter.requires_grad_(False)
        self._updates: dict[str, LowRank] = {}  # by the module's name in the head's files
        for name, layer in list(drafter.named_modules()):
            is_outside = is_outer(name) or name.startswith("markov.")  # no rank adapts them
            if isinstance(layer, nn.Linear) and not is_outside:
                update = LowRank(layer.weight, rank)
                self._updates[published[layer.weight.data_ptr()]] = update
                parametrize.register_parametrization(layer, "weight", update)

    def export(self, directory: Path, dtype: WeightDtype, card: Mapping[str, Any]) -> None:
        """Write the adapter in PEFT's layout, with its card; see `specdec.training.export`."""
        directory.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        for name, update in self._updates.items():
            for side, matrix in (("A", update.down), ("B", update.up)):
                tensors[f"{PREFIX}{name}.lora_{side}.weight"] = matrix.detach().cpu()
        write_tensors(directory / WEIGHT_FILES[0], tensors, getattr(torch, dtype))
        config = {
            "peft_type": "LORA",
            "base_model_name_or_path": str(self._start.directory),
            HEAD_KEY: self._start.fingerprint,
            "r": self._rank,
            "lora_alpha": self._rank,
            "target_modules": sorted(self._updates),
            "bias": "none",
        }
        for name, content in ((CONFIG_FILE, config), ("card.json", card)):
            write_json(directory / name, content)
