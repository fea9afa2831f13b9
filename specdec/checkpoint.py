"""Reads parts of tensors from a directory of safetensors files, never a whole model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec.config import QuantizationMethod, require_quantization
from specdec.errors import UnsupportedModelError

INDEX_FILE = "model.safetensors.index.json"

CPU = torch.device("cpu")


class CheckpointReader:
    """Slices of the tensors of one checkpoint, converted to `dtype`, on `device`.

    `quantization` says how linear layers are to hold the matrices that they read.
    `num_elements_read` counts what was read, so that a test can hold a rank to its share.
    """

    def __init__(
        self,
        tensors: dict[str, Any],
        directory: Path,
        dtype: torch.dtype,
        quantization: QuantizationMethod | None,
        device: torch.device = CPU,
    ) -> None:
        """`tensors` maps each name to the open file that holds it; see `open_checkpoint`."""
        self.dtype = dtype
        self.quantization = quantization
        self.device = device
        self.num_elements_read = 0
        self._files = tensors
        self._directory = directory

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: range | None = None,
        cols: range | None = None,
    ) -> Tensor:
        """The given rows and columns of a tensor whose whole shape must be `shape`.

        Raises UnsupportedModelError when the tensor is missing or of another shape.
        """
        if name not in self._files:
            raise UnsupportedModelError(f"{self._directory} has no tensor {name}")
        stored = self._files[name].get_slice(name)
        if tuple(stored.get_shape()) != shape:
            found = list(stored.get_shape())
            raise UnsupportedModelError(f"{name} has shape {found}; config.json says {list(shape)}")
        window = tuple(_as_slice(part) for part in (rows, cols)[: len(shape)])
        tensor: Tensor = stored[window].to(device=self.device, dtype=self.dtype)
        self.num_elements_read += tensor.numel()
        return tensor


@contextmanager
def open_checkpoint(
    directory: Path,
    dtype: torch.dtype,
    quantization: QuantizationMethod | None = None,
    device: torch.device = CPU,
) -> Iterator[CheckpointReader]:
    """Opens the model.safetensors of a directory, or the files that its index lists.

    Raises UnsupportedModelError for files that cannot be read, and InvalidValueError for a
    quantization that there is not, or not on this processor.
    """
    require_quantization(quantization)
    with ExitStack() as stack:
        tensors: dict[str, Any] = {}
        for path in _weight_files(directory):
            try:
                opened = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise UnsupportedModelError(f"{path} cannot be read: {error}") from error
            tensors.update(dict.fromkeys(opened.keys(), opened))
        yield CheckpointReader(tensors, directory, dtype, quantization, device)


def _weight_files(directory: Path) -> list[Path]:
    index = directory / INDEX_FILE
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        # A name in an index is a file beside it; anything else could read elsewhere on the disk.
        return [directory / Path(name).name for name in names]
    if (directory / "model.safetensors").is_file():
        return [directory / "model.safetensors"]
    raise UnsupportedModelError(f"{directory} holds no safetensors weights")


def _as_slice(part: range | None) -> slice:
    return slice(None) if part is None else slice(part.start, part.stop)
