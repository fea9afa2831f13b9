"""Tensors of a GGUF file as those of a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specdec.models.gguf.gguf_model import GGUFModel
from specdec.models.gguf.header import GGUFHeader, GGUFTensor
from specdec.models.gguf.rope import FACTOR_TENSORS
from specdec.types.errors import UnsupportedModelError

if TYPE_CHECKING:
    import torch

Values = NDArray[np.float32]


def read_rope_factors(model: GGUFModel) -> dict[str, list[float]]:
    """Return the values of the tensors that scale the rotary embedding, by their names."""
    found = {name: each for name, each in model.header.tensors.items() if name in FACTOR_TENSORS}
    return {name: read_values(name, each).ravel().tolist() for name, each in found.items()}


def require_whole(header: GGUFHeader) -> None:
    """Raise UnsupportedModelError for a file that ends before one of its tensors does."""
    gguf: Any = _library()
    for name, tensor in header.tensors.items():
        size = tensor.path.stat().st_size
        try:
            shape = gguf.quant_shape_to_byte_shape(
                tensor.shape, gguf.GGMLQuantizationType(tensor.kind)
            )
        except ValueError:
            continue  # `read_values` names what is unknown, if it is read
        if (end := tensor.offset + prod(shape)) > size:
            raise UnsupportedModelError(
                f"{tensor.path.name} has {size} bytes, and its tensor {name} ends at {end}: it was "
                "not copied or downloaded completely; fetch it again"
            )


def convert_tensors(model: GGUFModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return all weights by their names in Hugging Face files.

    Raises UnsupportedModelError for a tensor that is cut, or of an unknown type or shape.
    """
    import torch

    return {
        other: torch.from_numpy(np.require(values, np.float32, ("C", "W"))).to(dtype)
        for name, target in model.names().items()
        for other, values in _converted(model, name, target)
    }


def _converted(model: GGUFModel, name: str, target: str) -> Iterator[tuple[str, Values]]:
    values = read_values(name, model.header.tensors[name])
    if "*" in target:
        for index, expert in enumerate(values):
            yield target.replace("*", str(index)), expert
        return
    if model.family.pairs_rows and ".attn_q." in name:
        values = _by_halves(name, values, model.num_heads)
    if model.family.pairs_rows and ".attn_k." in name:
        values = _by_halves(name, values, model.num_kv_heads)
    if model.family.norm_offset and name.endswith("norm.weight"):
        values = values - np.float32(model.family.norm_offset)
    yield target, values


def _by_halves(name: str, values: Values, num_heads: int) -> Values:
    """Reorder rows of each head from neighbouring pairs to halves; values: [rows, ...]."""
    rows, rest = values.shape[0], values.shape[1:]
    if rows % (2 * num_heads):
        limit = f"a multiple of {2 * num_heads} rows"
        raise UnsupportedModelError(f"{name} has {rows} rows; it must have {limit}")
    return (
        values.reshape(num_heads, rows // num_heads // 2, 2, *rest)
        .swapaxes(1, 2)
        .reshape(-1, *rest)
    )


def read_values(name: str, tensor: GGUFTensor) -> Values:
    """Return the values of a tensor in float32, dequantized.

    Raises UnsupportedModelError for a tensor that is cut, or of an unknown type.
    """
    gguf: Any = _library()
    try:
        kind = gguf.GGMLQuantizationType(tensor.kind)
        shape = gguf.quant_shape_to_byte_shape(tensor.shape, kind)
        data = np.memmap(tensor.path, np.uint8, "r")[tensor.offset :][: prod(shape)]
        values = gguf.dequantize(data.reshape(shape), kind)
    except (ValueError, IndexError, NotImplementedError, OverflowError) as error:
        message = f"tensor {name} of {tensor.path.name} cannot be read: {error}"
        raise UnsupportedModelError(message) from error
    return np.asarray(values, np.float32)


def _library() -> Any:
    import gguf  # a fraction of a second, which few processes need
    import gguf.quants

    return gguf
