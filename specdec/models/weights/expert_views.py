"""Matrices of single experts in tensors of all experts, which some checkpoints have.

Layers read each expert as separate matrices, under names that then do not exist in the files. With
E experts, H hidden and I expert units: `gate_up_proj` [E, 2 I, H], the rows of the gate first, or
`up_proj` [E, I, H], and `down_proj` [E, H, I]. The transposed ones of GPT-OSS are in `gpt_oss`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_MAX_EXPERTS = 4096
_STACK = re.compile(r"(.+\.experts)\.(gate_up|up|down)_proj")
_PARTS = {"gate_up": ("gate", "up"), "up": ("up",), "down": ("down",)}


class ExpertView(NamedTuple):
    """The matrix of an expert in a stored tensor: `shape[0]` rows of it, from `first` on."""

    stored: str
    expert: int
    first: int
    shape: tuple[int, int]

    def window(self, rows: slice, cols: slice) -> tuple[slice, slice, slice]:
        """Return the part of the stored tensor with these rows and columns of the matrix."""
        start, stop, _ = rows.indices(self.shape[0])
        expert = slice(self.expert, self.expert + 1)
        return expert, slice(self.first + start, self.first + stop), cols


def expert_views(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, ExpertView]:
    """Return the matrices of experts by name. shapes: of all tensors of a checkpoint."""
    return {name: view for stored in shapes for name, view in _views(stored, shapes)}


def _views(stored: str, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, ExpertView]]:
    match = _STACK.fullmatch(stored)
    if match is None or not _is_stack(match[1], shapes):
        return
    count, rows, inputs = shapes[stored]
    parts = _PARTS[match[2]]
    size = rows // len(parts)
    for expert in range(count):
        for place, part in enumerate(parts):
            name = f"{match[1]}.{expert}.{part}_proj.weight"
            yield name, ExpertView(stored, expert, place * size, (size, inputs))


def _is_stack(prefix: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether the tensors after a prefix have the shapes of a stack of experts."""
    down = shapes.get(f"{prefix}.down_proj", ())
    if len(down) != 3 or not 0 < down[0] <= _MAX_EXPERTS:
        return False
    count, hidden, units = down
    gated, plain = (shapes.get(f"{prefix}.{part}_proj") for part in ("gate_up", "up"))
    return gated == (count, 2 * units, hidden) or plain == (count, units, hidden)
