"""Quantized weights as tensors of the shape and the values that they stand for.

For readers that know a checkpoint by the names and shapes of its weights, such as those of draft
heads: each quantized weight is one tensor `x.weight`, and the tensors that describe it are hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from specdec.models.weights.checks import is_of_activations, stored_parts
from specdec.models.weights.dequantize import WeightFormat, weight_format
from specdec.models.weights.stored_tensors import PickledTensors, StoredTensors, TensorSource
from specdec.models.weights.tensor_headers import TensorHeader
from specdec.models.weights.weight_files import PICKLED
from specdec.types.errors import UnsupportedModelError


@dataclass(frozen=True)
class DequantizedTensors:
    """A TensorSource over another one, in which some weights are quantized in a layout."""

    stored: TensorSource
    layout: WeightFormat

    def __contains__(self, name: str) -> bool:
        return self._is_quantized(name) or name in self.stored

    def shape(self, name: str) -> tuple[int, ...]:
        """See TensorSource."""
        if self._is_quantized(name):
            return self.layout.shape(self.stored, name)
        return self.stored.shape(name)

    def dtype(self, name: str) -> str:
        """See TensorSource."""
        return "F32" if self._is_quantized(name) else self.stored.dtype(name)

    def slice(self, name: str, *window: slice) -> Tensor:
        """Return a part of a tensor: of a quantized weight in float32, else as it is stored."""
        if not self._is_quantized(name):
            return self.stored.slice(name, *window)
        given = dict(enumerate(window))
        parts = (
            range(size)[given.get(dim, slice(None))] for dim, size in enumerate(self.shape(name))
        )
        return self.layout.read(self.stored, name, *parts)

    def headers(self, stored: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
        """Return the headers of the tensors that stored ones make up; values are float32.

        Raises UnsupportedModelError for a quantized weight that is not as its layout describes.
        """
        headers: dict[str, TensorHeader] = {}
        parts: set[str] = set()
        for name, header in stored.items():
            weight = self._weight_of(name)
            if weight is None:
                headers[name] = header
            elif weight not in headers:
                headers[weight] = TensorHeader("F32", self.shape(weight))
                shape = headers[weight].shape
                parts.update(stored_parts(self.stored, self.layout, weight, shape))
        for name in stored.keys() - headers.keys() - parts:
            if not is_of_activations(name):
                raise UnsupportedModelError(f"{name} is part of no layout that the files describe")
        return headers

    def _weight_of(self, name: str) -> str | None:
        """Return the quantized weight that a stored tensor is a part of; None for others."""
        if name.endswith(".bias"):
            return None
        ends = (place for place, character in enumerate(name) if character == ".")
        weights = (f"{name[:end]}.weight" for end in ends)
        return next((each for each in weights if self._is_quantized(each)), None)

    def _is_quantized(self, name: str) -> bool:
        return name.endswith(".weight") and self.layout.holds(self.stored, name)


def open_tensors(
    files: Sequence[Path], directory: Path, quantization: Mapping[str, Any] | None
) -> TensorSource:
    """Open weight files, in which weights may be quantized.

    quantization: `quantization_config` of config.json; None without one. Raises
    UnsupportedModelError for a layout that cannot be read.
    """
    kind = PickledTensors if files[0].suffix in PICKLED else StoredTensors
    stored, layout = kind(files, directory), weight_format(quantization)
    return stored if layout is None else DequantizedTensors(stored, layout)


def dequantized_headers(
    stored: Mapping[str, TensorHeader],
    files: Sequence[Path],
    directory: Path,
    quantization: Mapping[str, Any],
) -> dict[str, TensorHeader]:
    """Return the headers of the tensors that stored ones make up; see `open_tensors`."""
    tensors = open_tensors(files, directory, quantization)
    assert isinstance(tensors, DequantizedTensors)
    return tensors.headers(stored)
