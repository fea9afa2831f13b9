"""Keys that families with recurrent layers share: which layers these are, and their windows."""

from __future__ import annotations

from specdec.config.json_values import unsupported
from specdec.models.config.recurrent import Recurrent, RecurrentKind

FULL, CONVOLUTION, LINEAR = "full_attention", "conv", "linear_attention"

PUBLISHED_TYPES = {"mamba": LINEAR, "attention": FULL}
"""Types of layers in older files, and those of transformers 5."""

_MAX_KERNEL_SIZE = 64


def require_window(name: str, kernel_size: int) -> None:
    """Raise UnsupportedModelError for the size of a convolution. name: its key."""
    if not 2 <= kernel_size <= _MAX_KERNEL_SIZE:
        raise unsupported(name, kernel_size, f"from 2 to {_MAX_KERNEL_SIZE}")


def recurrent_layers(types: object, num_layers: int, name: str, kind: RecurrentKind) -> Recurrent:
    """Return the layers whose type has `name`.

    Raises UnsupportedModelError unless these and full attention are the types that occur.
    """
    if not isinstance(types, list) or len(types) != num_layers or {*types} != {FULL, name}:
        raise unsupported("layer_types", types, f"{num_layers} times {name} or {FULL}, and both")
    return Recurrent(frozenset(index for index, each in enumerate(types) if each == name), kind)
