"""Reading of slices of tensors from a directory of safetensors files."""

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

from specdec.config.quantization import QuantizationMethod, require_quantization
from specdec.kernels.backend import KernelBackend
from specdec.models.weights.dequantize import WeightFormat, weight_format
from specdec.types.errors import UnsupportedModelError

logger = logging.getLogger(__name__)

_SHORT_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes that float32 represents exactly, by their names in safetensors."""

INDEX_FILE = "model.safetensors.index.json"

CPU = torch.device("cpu")


@dataclass(frozen=True)
class _StoredTensor:
    path: Path
    shape: tuple[int, ...]
    short_dtype: torch.dtype | None


class StoredTensors:
    """The tensors of a checkpoint by name, in one or several files.

    Reading a missing tensor raises UnsupportedModelError.

    A file is opened for each read: it stays mapped, and the pages that were read stay resident,
    while it is open or one of its tensors is in use.
    """

    def __init__(self, paths: Iterable[Path], directory: Path) -> None:
        """Read the headers of all files. Raises UnsupportedModelError for an unreadable file."""
        self._directory = directory
        self._tensors: dict[str, _StoredTensor] = {}
        for path in paths:
            with _open(path) as file:
                names: list[str] = file.keys()
                for name in names:
                    tensor = file.get_slice(name)
                    short_dtype = _SHORT_DTYPES.get(tensor.get_dtype())
                    shape = tuple(tensor.get_shape())
                    self._tensors[name] = _StoredTensor(path, shape, short_dtype)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._stored(name).shape

    def short_dtype(self, name: str) -> torch.dtype | None:
        """Return the stored dtype if it is a 16-bit floating-point type, else None."""
        return self._stored(name).short_dtype

    def slice(self, name: str, *window: slice) -> Tensor:
        """Return a part of a tensor as it is stored; all of it without a window."""
        with _open(self._stored(name).path) as file:
            tensor: Tensor = file.get_slice(name)[window] if window else file.get_tensor(name)
        return tensor

    def _stored(self, name: str) -> _StoredTensor:
        if name not in self._tensors:
            raise UnsupportedModelError(f"{self._directory} has no tensor {name}")
        return self._tensors[name]


@dataclass
class CheckpointReader:
    """Reader of slices of a checkpoint's tensors, dequantized, in `dtype`, on `device`.

    quantization, backend: format and kernels of the matrices that linear layers make.
    weight_format: layout of the quantized weights in `tensors`, if there are any.
    num_elements_read: number of elements read so far, for tests of sharding.
    """

    tensors: StoredTensors
    dtype: torch.dtype
    quantization: QuantizationMethod | None
    weight_format: WeightFormat | None
    device: torch.device = CPU
    backend: KernelBackend = KernelBackend.TORCH
    num_elements_read: int = 0

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: range | None = None,
        cols: range | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Read rows and columns of a tensor whose whole shape must be `shape`.

        dtype: of the result, instead of the reader's; see `exact_dtype`.

        Raises UnsupportedModelError if the tensor is missing or has another shape.
        """
        packed = self._packed_as(name)
        found = packed.shape(self.tensors, name) if packed else self.tensors.shape(name)
        if found != shape:
            expected = f"config.json requires {list(shape)}"
            raise UnsupportedModelError(f"{name} has shape {list(found)}; {expected}")
        window = [
            part if part is not None else range(size)
            for part, size in zip((rows, cols), shape, strict=False)
        ]
        tensor = (
            packed.read(self.tensors, name, *window)
            if packed
            else self.tensors.slice(name, *(slice(part.start, part.stop) for part in window))
        ).to(device=self.device, dtype=dtype or self.dtype)
        self.num_elements_read += tensor.numel()
        # A vector may be used without a copy, which would keep the whole file mapped.
        return tensor.clone() if len(shape) == 1 else tensor

    def exact_dtype(self, *names: str) -> torch.dtype:
        """Return the shortest dtype that represents the values of these tensors exactly.

        That is the stored dtype if `dtype` is float32 and all are stored in the same 16-bit dtype,
        else `dtype`.
        """
        stored = {
            None if self._packed_as(each) else self.tensors.short_dtype(each) for each in names
        }
        common = stored.pop() if len(stored) == 1 else None
        return common if common is not None and self.dtype == torch.float32 else self.dtype

    def _packed_as(self, name: str) -> WeightFormat | None:
        """Return the format of a quantized weight; None for another tensor."""
        layout = self.weight_format
        return layout if layout and layout.holds(self.tensors, name) else None


def open_checkpoint(
    directory: Path,
    dtype: torch.dtype,
    quantization: QuantizationMethod | None = None,
    device: torch.device = CPU,
    backend: KernelBackend = KernelBackend.TORCH,
) -> CheckpointReader:
    """Open the model.safetensors of a directory, or the files of its index.

    Raises UnsupportedModelError for files that cannot be read, and InvalidValueError for a
    quantization that does not exist or that this processor does not support.
    """
    require_quantization(quantization)
    layout = _weight_format(directory)
    stored = StoredTensors(_weight_files(directory), directory)
    return CheckpointReader(stored, dtype, quantization, layout, device, backend)


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
            "the quantized weights in %s are dequantized during loading: memory and speed are "
            "those of the dtype of the service",
            directory,
        )
    return layout


def _weight_files(directory: Path) -> list[Path]:
    index = directory / INDEX_FILE
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        # Only files next to the index are read; another path could be anywhere on the disk.
        return [directory / Path(name).name for name in names]
    if (directory / "model.safetensors").is_file():
        return [directory / "model.safetensors"]
    raise UnsupportedModelError(f"{directory} has no safetensors weights")
