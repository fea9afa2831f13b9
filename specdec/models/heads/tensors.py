"""The tensors of a head's files under the names of this package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from specdec.models.heads.config import HeadConfig
from specdec.models.heads.formats.source import read_fields
from specdec.models.weights.dequantized_tensors import open_tensors
from specdec.models.weights.stored_tensors import TensorSource


@dataclass(frozen=True)
class HeadTensors:
    """A TensorSource that renames tensors, and can select rows of some of them.

    stored: the name in `source` of each tensor. rows: for some tensors, the indices of the rows
    that they consist of, [R] int64. adds_one: to norms, which are stored as differences from 1.
    values: tensors that replace stored ones.
    """

    source: TensorSource
    stored: Mapping[str, str]
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    adds_one: bool = False
    values: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def open(cls, config: HeadConfig) -> HeadTensors:
        """Open the files of a head, in which weights may be quantized."""
        quantization = read_fields(config.directory).raw.get("quantization_config")
        source = open_tensors(config.files, config.directory, quantization)
        return cls(source, config.names.stored, adds_one=config.shape.adds_one)

    def with_rows(self, names: Sequence[str], rows: Tensor) -> HeadTensors:
        """Return the tensors, with only some rows of `names`. rows: indices, [R] int64."""
        return replace(self, rows=dict.fromkeys(names, rows))

    def __contains__(self, name: str) -> bool:
        return name in self.stored or name in self.values

    def shape(self, name: str) -> tuple[int, ...]:
        """See TensorSource."""
        if name in self.values:
            return tuple(self.values[name].shape)
        shape = self.source.shape(self._stored(name))
        return (len(self.rows[name]), *shape[1:]) if name in self.rows else shape

    def dtype(self, name: str) -> str:
        """See TensorSource."""
        return "F32" if name in self.values else self.source.dtype(self._stored(name))

    def slice(self, name: str, *window: slice) -> Tensor:
        """See TensorSource."""
        if name in self.values:
            return self.values[name][window]
        if name not in self.rows:
            tensor = self.source.slice(self._stored(name), *window)
            is_difference = self.adds_one and name.endswith("norm.weight")
            return tensor.float() + 1 if is_difference else tensor
        first, *others = window or (slice(None),)
        stored = self.source.slice(self._stored(name))
        return stored[self.rows[name][first]][(slice(None), *others)]

    def _stored(self, name: str) -> str:
        return self.stored.get(name, name)
