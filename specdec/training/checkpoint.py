"""Checkpoints of a training run: one file, replaced atomically.

The samples of a step, the bases that it trains and the tokens that it draws are a function of its
number and the seed, and training draws no other random numbers after the initial weights. So
weights, optimizer and step are the whole state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from specdec.training.atomic_files import write_atomically
from specdec.types.errors import SpecdecError, reason_of

_FILE = "checkpoint.safetensors"
_WEIGHTS, _OPTIMIZER = "weights.", "optimizer."


class CheckpointError(SpecdecError):
    """The file of a checkpoint cannot be read."""


@dataclass(frozen=True)
class Checkpoint:
    """The state after a number of steps.

    run: what the run was started with; a checkpoint continues an equal run only.
    progress: of the trainer, as JSON. weights, optimizer: tensors by name.
    """

    step: int
    run: Mapping[str, Any]
    progress: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]

    def save(self, directory: Path) -> None:
        """Replace the checkpoint of a directory, durably."""
        tensors = {f"{_WEIGHTS}{name}": each for name, each in self.weights.items()}
        tensors |= {f"{_OPTIMIZER}{name}": each for name, each in self.optimizer.items()}
        state = {"step": self.step, "run": self.run, "progress": self.progress}
        tensors = {name: each.cpu().contiguous() for name, each in tensors.items()}
        write_atomically(directory / _FILE, save(tensors, {"state": json.dumps(state)}))

    @staticmethod
    def exists(directory: Path) -> bool:
        """Return whether a directory has a checkpoint."""
        return (directory / _FILE).is_file()

    @classmethod
    def load(cls, directory: Path) -> Checkpoint | None:
        """Return the checkpoint of a directory; None without one. Raises CheckpointError."""
        if not cls.exists(directory):
            return None
        path = directory / _FILE
        try:
            return cls._read(path)
        except (OSError, SafetensorError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise CheckpointError(
                f"{path} is damaged ({reason_of(error)[:200]}); restore a copy of it, or delete "
                "it to begin the run again"
            ) from error

    @classmethod
    def _read(cls, path: Path) -> Checkpoint:
        with safe_open(path, framework="pt") as file:
            state = json.loads((file.metadata() or {})["state"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return cls(
            **state,
            weights=_with_prefix(tensors, _WEIGHTS),
            optimizer=_with_prefix(tensors, _OPTIMIZER),
        )


def _with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)
    }
