"""Reads parts of tensors from a directory of safetensors files, never a whole model."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec.config.engine import Kernels
from specdec.config.quantization import QuantizationMethod, require_quantization
from specdec.models.weights.dequantize import StoredTensors, WeightFormat, weight_format
from specdec.types.errors import UnsupportedModelError

logger = logging.getLogger(__name__)

_SHORT_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}
"""Those that float32 holds exactly, by the names that safetensors has for them."""

INDEX_FILE = "model.safetensors.index.json"

CPU = torch.device("cpu")


@dataclass(frozen=True)
class _Place:
    path: Path
    shape: tuple[int, ...]
    short_dtype: torch.dtype | None


class StoredFiles:
    """Every tensor of a checkpoint, in whichever file it is. See `StoredTensors`.

    A file is opened for each tensor: it is mapped into memory while it is open or a tensor of it is
    in use, and what was read of it stays resident so long.
    """

    def __init__(self, paths: Iterable[Path], directory: Path) -> None:
        """Finds what is in which file. Raises UnsupportedModelError for one that is unreadable."""
        self._directory = directory
        self._places: dict[str, _Place] = {}
        for path in paths:
            with _open(path) as file:
                names: list[str] = file.keys()
                for name in names:
                    tensor = file.get_slice(name)
                    short_dtype = _SHORT_DTYPES.get(tensor.get_dtype())
                    self._places[name] = _Place(path, tuple(tensor.get_shape()), short_dtype)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises UnsupportedModelError where there is no such tensor."""
        return self._place(name).shape

    def short_dtype(self, name: str) -> torch.dtype | None:
        """What the tensor is stored in, if that is a floating-point type of 16 bits.

        Raises UnsupportedModelError where there is no such tensor.
        """
        return self._place(name).short_dtype

    def slice(self, name: str, *window: slice) -> Tensor:
        """A part of a tensor, as it is stored; all of it without a window."""
        with _open(self._place(name).path) as file:
            tensor: Tensor = file.get_slice(name)[window] if window else file.get_tensor(name)
        return tensor

    def _place(self, name: str) -> _Place:
        if name not in self._places:
            raise UnsupportedModelError(f"{self._directory} has no tensor {name}")
        return self._places[name]


class CheckpointReader:
    """Slices of the tensors of one checkpoint, dequantized, converted to `dtype`, on `device`.

    `quantization` says how linear layers are to hold the matrices that they read, and `kernels`
    what is to multiply by them.
    `num_elements_read` counts what was read, so that a test can hold a rank to its share.
    """

    def __init__(
        self,
        tensors: StoredTensors,
        dtype: torch.dtype,
        quantization: QuantizationMethod | None,
        weight_format: WeightFormat | None,
        device: torch.device = CPU,
        kernels: Kernels = "auto",
    ) -> None:
        """weight_format: how the quantized weights among `tensors` are laid out, if any are."""
        self.dtype = dtype
        self.quantization = quantization
        self.kernels = kernels
        self.device = device
        self.num_elements_read = 0
        self._tensors = tensors
        self._format = weight_format

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: range | None = None,
        cols: range | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The given rows and columns of a tensor whose whole shape must be `shape`.

        dtype: of what is returned, in place of the reader's; see `exact_dtype`.

        Raises UnsupportedModelError when the tensor is missing or of another shape.
        """
        packed = self._packed_as(name)
        found = packed.shape(self._tensors, name) if packed else self._tensors.shape(name)
        if found != shape:
            expected = f"config.json says {list(shape)}"
            raise UnsupportedModelError(f"{name} has shape {list(found)}; {expected}")
        window = [
            part if part is not None else range(size)
            for part, size in zip((rows, cols), shape, strict=False)
        ]
        tensor = (
            packed.read(self._tensors, name, *window)
            if packed
            else self._tensors.slice(name, *(slice(part.start, part.stop) for part in window))
        ).to(device=self.device, dtype=dtype or self.dtype)
        self.num_elements_read += tensor.numel()
        # A vector may be kept as it is, and would keep the whole file mapped; so would a table.
        return tensor.clone() if len(shape) == 1 else tensor

    def exact_dtype(self, *names: str) -> torch.dtype:
        """The shortest data type that holds exactly what all these tensors are in `dtype`.

        That is `dtype`, or what they all are stored in where float32 only widens it.
        """
        stored = {
            None if self._packed_as(each) else self._tensors.short_dtype(each) for each in names
        }
        common = stored.pop() if len(stored) == 1 else None
        return common if common is not None and self.dtype == torch.float32 else self.dtype

    def _packed_as(self, name: str) -> WeightFormat | None:
        """The format of a quantized weight; None for a tensor that is not one."""
        return self._format if self._format and self._format.holds(self._tensors, name) else None


def open_checkpoint(
    directory: Path,
    dtype: torch.dtype,
    quantization: QuantizationMethod | None = None,
    device: torch.device = CPU,
    kernels: Kernels = "auto",
) -> CheckpointReader:
    """Opens the model.safetensors of a directory, or the files that its index lists.

    Raises UnsupportedModelError for files that cannot be read, and InvalidValueError for a
    quantization that there is not, or not on this processor.
    """
    require_quantization(quantization)
    layout = _weight_format(directory)
    stored = StoredFiles(_weight_files(directory), directory)
    return CheckpointReader(stored, dtype, quantization, layout, device, kernels)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UnsupportedModelError(f"{path} cannot be read: {error}") from error


def _weight_format(directory: Path) -> WeightFormat | None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    layout = weight_format(config.get("quantization_config"))
    if layout is not None:
        logger.warning(
            "the weights in %s are quantized and are dequantized as they load: memory and speed "
            "are those of the data type that is served",
            directory,
        )
    return layout


def _weight_files(directory: Path) -> list[Path]:
    index = directory / INDEX_FILE
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        # A name in an index is a file beside it; anything else could read elsewhere on the disk.
        return [directory / Path(name).name for name in names]
    if (directory / "model.safetensors").is_file():
        return [directory / "model.safetensors"]
    raise UnsupportedModelError(f"{directory} holds no safetensors weights")
