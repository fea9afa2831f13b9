"""The layouts of bitsandbytes (Dettmers et al. 2022 and 2023), as transformers stores them.

In 4 bits `x.weight` is uint8 [values / 2, 1]: the weight row by row, the first of two values in the
upper half of a byte. Beside it, under names that begin with `x.weight.`:

- `quant_map` [16]: what each value stands for, of NF4 or FP4;
- `absmax`: the factor of each block of values, float32; or uint8 with double quantization, then
  `nested_quant_map` [256] has what it stands for, `nested_absmax` the factor of each block of
  factors, and the offset is added;
- `quant_state.bitsandbytes__nf4` or `...__fp4`: JSON as bytes: shape, block sizes, offset.

In 8 bits `x.weight` is int8 [out, in], and `x.SCB` [out] has the largest magnitude of each output.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.config.json_values import count
from specdec.models.weights.stored_tensors import TensorSource
from specdec.models.weights.tensor_headers import FLOATS, HeaderSource, require_tensor, sibling
from specdec.models.weights.weight_slices import as_slice, require_shape, units_of
from specdec.types.errors import UnsupportedModelError

_LARGEST_INT8 = 127
_MAX_REASON_CHARS = 200


@dataclass(frozen=True)
class BitsAndBytes:
    """A WeightFormat: weights in 4 bits, or int8."""

    def holds(self, tensors: HeaderSource, name: str) -> bool:
        """See WeightFormat."""
        return f"{name}.quant_map" in tensors or sibling(name, "SCB") in tensors

    def shape(self, tensors: TensorSource, name: str) -> tuple[int, ...]:
        """See WeightFormat."""
        if sibling(name, "SCB") in tensors:
            return tensors.shape(name)
        return _state(tensors, name).shape

    def parts(self, tensors: HeaderSource, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        """See WeightFormat."""
        factors = sibling(name, "SCB")
        if factors in tensors:
            return (
                require_tensor(tensors, name, ("I8",), shape),
                require_tensor(tensors, factors, FLOATS, shape[:1]),
            )
        if (dtype := tensors.dtype(name)) != "U8":
            limit = "bnb_4bit_quant_storage must be uint8"
            raise UnsupportedModelError(f"{name} has 4-bit values of type {dtype}; {limit}")
        num_bytes = -(-shape[0] * shape[1] // 2)
        return (
            require_tensor(tensors, name, ("U8",), (num_bytes, 1)),
            require_tensor(tensors, f"{name}.quant_map", FLOATS, (16,)),
            _name_of_state(tensors, name),
            *self._factor_parts(tensors, name),
        )

    def _factor_parts(self, tensors: HeaderSource, name: str) -> Iterator[str]:
        """Yield the names of the factors, whose numbers only the description has."""
        absmax, nested = f"{name}.absmax", f"{name}.nested_absmax"
        is_nested = nested in tensors or tensors.dtype(absmax) == "U8"
        dtypes = ("U8",) if is_nested else FLOATS
        yield require_tensor(tensors, absmax, dtypes, tensors.shape(absmax))
        if is_nested:
            yield require_tensor(tensors, nested, FLOATS, tensors.shape(nested))
            yield require_tensor(tensors, f"{name}.nested_quant_map", FLOATS, (256,))

    def read(self, tensors: TensorSource, name: str, rows: range, cols: range) -> Tensor:
        """See WeightFormat."""
        if sibling(name, "SCB") in tensors:
            return _read_int8(tensors, name, rows, cols)
        state = _state(tensors, name)
        out_features, in_features = state.shape
        num_blocks = -(-out_features * in_features // state.block_size)
        require_shape(tensors, f"{name}.absmax", (num_blocks,))
        held = range(rows.start * in_features, rows.stop * in_features)
        values = tensors.slice(f"{name}.quant_map").float()[_halves(tensors, name, held)]
        values *= _factors(tensors, name, state, held)
        return values.view(len(rows), in_features)[:, as_slice(cols)]


@dataclass(frozen=True)
class _State:
    """The description of a weight in 4 bits.

    block_size: values that share a factor. nested_size, offset: of double quantization, the factors
    that share one, and what is added to them.
    """

    shape: tuple[int, int]
    block_size: int
    nested_size: int
    offset: float


def _state(tensors: TensorSource, name: str) -> _State:
    """Read the description of a weight. Raises UnsupportedModelError."""
    stored = _name_of_state(tensors, name)
    try:
        raw = json.loads(bytes(tensors.slice(stored).tolist()))
        out_features, in_features = raw["shape"]
        return _State(
            (out_features, in_features),
            count(raw, "blocksize"),
            count(raw, "nested_blocksize", 1),
            float(raw.get("nested_offset", 0.0)),
        )
    except (ValueError, TypeError, KeyError, RecursionError, UnsupportedModelError) as error:
        reason = " ".join(str(error).split())[:_MAX_REASON_CHARS]
        raise UnsupportedModelError(f"{stored} does not describe a matrix: {reason}") from error


def _name_of_state(tensors: HeaderSource, name: str) -> str:
    known = (f"{name}.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
    stored = next((each for each in known if each in tensors), None)
    if stored is None:
        raise UnsupportedModelError(f"{name} has a quant_map, but no quant_state")
    return stored


def _halves(tensors: TensorSource, name: str, values: range) -> Tensor:
    """Return the 4-bit values of a range of the flat weight, [len(values)] int64."""
    held = units_of(values, 2)
    packed = tensors.slice(name, as_slice(held), slice(None)).flatten()
    halves = torch.stack((packed >> 4, packed & 15), dim=-1).flatten()
    start = values.start - 2 * held.start
    return halves[start : start + len(values)].long()


def _factors(tensors: TensorSource, name: str, state: _State, values: range) -> Tensor:
    """Return the factor of each of a range of values, [len(values)] float32."""
    size = state.block_size
    held = units_of(values, size)
    absmax = tensors.slice(f"{name}.absmax", as_slice(held))
    if f"{name}.nested_absmax" in tensors:
        levels = tensors.slice(f"{name}.nested_quant_map").float()
        blocks = torch.arange(held.start, held.stop) // state.nested_size
        outer = tensors.slice(f"{name}.nested_absmax").float()[blocks]
        absmax = levels[absmax.long()] * outer + state.offset
    index = torch.arange(values.start, values.stop) // size - held.start
    return absmax.float()[index]


def _read_int8(tensors: TensorSource, name: str, rows: range, cols: range) -> Tensor:
    largest = tensors.slice(sibling(name, "SCB"), as_slice(rows)).float()
    values = tensors.slice(name, as_slice(rows), as_slice(cols)).float()
    return values * (largest / _LARGEST_INT8)[:, None]
