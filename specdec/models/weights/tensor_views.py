"""Tensors that layers read, where a checkpoint has them as parts of others, or in several parts.

Layers read each expert as separate matrices. With E experts, H hidden and I expert units, some
files have `gate_up_proj` [E, 2 I, H], the rows of the gate first, or `up_proj` [E, I, H], and
`down_proj` [E, H, I]; or both transposed, [E, H, 2 I] and [E, I, H]. Those of GPT-OSS, whose gate
and up rows alternate, are in `gpt_oss`. The convolution of queries, keys and values is one tensor
for layers, and three in some files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of the tensors of a checkpoint, by name."""

_MAX_EXPERTS = 4096
_STACK = re.compile(r"(.+\.experts)\.(gate_up|up|down)_proj")
_PARTS = {"gate_up": ("gate", "up"), "up": ("up",), "down": ("down",)}
_QUERY_CONVOLUTION = ".q_conv1d.weight"


class StoredPart(NamedTuple):
    """A part of a stored tensor, one slice for each dimension."""

    stored: str
    window: tuple[slice, ...]


class ExpertView(NamedTuple):
    """The matrix of an expert in a stored tensor: `shape[0]` rows of it, from `first` on.

    is_transposed: whether they are columns of the stored tensor.
    """

    stored: tuple[str]
    expert: int
    first: int
    shape: tuple[int, int]
    is_transposed: bool = False

    def part(self, rows: slice, cols: slice) -> StoredPart:
        """Return the part with these rows and columns, after a dimension of 1."""
        start, stop, _ = rows.indices(self.shape[0])
        expert, own = (
            slice(self.expert, self.expert + 1),
            slice(self.first + start, self.first + stop),
        )
        window = (expert, cols, own) if self.is_transposed else (expert, own, cols)
        return StoredPart(*self.stored, window)


class JoinedView(NamedTuple):
    """The rows of several stored tensors, one after the other. sizes: rows of each."""

    stored: tuple[str, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]

    def parts(self, rows: slice, *others: slice) -> Iterator[StoredPart]:
        """Yield the parts with these rows. others: of the other dimensions."""
        start, stop, _ = rows.indices(self.shape[0])
        first = 0
        for name, size in zip(self.stored, self.sizes, strict=True):
            own = slice(max(start - first, 0), min(stop - first, size))
            if own.start < own.stop:
                yield StoredPart(name, (own, *others))
            first += size


TensorView = ExpertView | JoinedView


def tensor_views(shapes: Shapes) -> dict[str, TensorView]:
    """Return the tensors that are not stored as such, by name."""
    found: dict[str, TensorView] = {}
    for stored in shapes:
        if stored.endswith("_proj"):
            found |= _experts(stored, shapes)
        if stored.endswith(_QUERY_CONVOLUTION):
            found |= _convolution(stored.removesuffix(_QUERY_CONVOLUTION), shapes)
    return found


def _experts(stored: str, shapes: Shapes) -> Iterator[tuple[str, ExpertView]]:
    match = _STACK.fullmatch(stored)
    is_transposed = None if match is None else _is_transposed(match[1], shapes)
    if match is None or is_transposed is None or len(shapes[stored]) != 3:
        return
    count, *matrix = shapes[stored]
    rows, inputs = reversed(matrix) if is_transposed else matrix
    parts = _PARTS[match[2]]
    size = rows // len(parts)
    for expert in range(count):
        for place, part in enumerate(parts):
            name = f"{match[1]}.{expert}.{part}_proj.weight"
            own = (size, inputs)
            yield name, ExpertView((stored,), expert, place * size, own, is_transposed)


def _is_transposed(prefix: str, shapes: Shapes) -> bool | None:
    """Return whether a stack of experts is transposed; None without one after the prefix."""
    down = shapes.get(f"{prefix}.down_proj", ())
    if len(down) != 3 or not 0 < down[0] <= _MAX_EXPERTS or f"{prefix}.down_proj_bias" in shapes:
        return None
    count, rows, inputs = down
    gated, plain = (shapes.get(f"{prefix}.{part}_proj") for part in ("gate_up", "up"))
    if gated == (count, 2 * inputs, rows) or plain == (count, inputs, rows):
        return False
    return True if gated == (count, inputs, 2 * rows) else None


def _convolution(prefix: str, shapes: Shapes) -> Iterator[tuple[str, JoinedView]]:
    names = tuple(f"{prefix}.{part}_conv1d.weight" for part in "qkv")
    found = [shapes.get(name, ()) for name in names]
    others = found[0][1:]
    if len(others) == 2 and all(each[1:] == others for each in found):
        sizes = tuple(each[0] for each in found)
        yield f"{prefix}.conv1d.weight", JoinedView(names, sizes, (sum(sizes), *others))
