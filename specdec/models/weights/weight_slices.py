"""Parts of packed tensors: the units and groups that contain a range of rows or columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.models.weights.stored_tensors import TensorSource
from specdec.types.errors import UnsupportedModelError


@dataclass(frozen=True)
class Groups:
    """The groups that contain a range of positions, and the index of each position's group."""

    held: range
    index: Tensor  # [positions] int64


def groups_of(positions: range, group_size: int, total: int) -> Groups:
    """Return the groups of positions in range(total)."""
    size = resolved_group_size(group_size, total)
    held = units_of(positions, size)
    return Groups(held, torch.arange(positions.start, positions.stop) // size - held.start)


def resolved_group_size(group_size: int, total: int) -> int:
    """Resolve -1, which means one group."""
    return total if group_size == -1 else group_size


def num_groups(total: int, group_size: int) -> int:
    """Return the number of groups of `total` positions; the last one may be smaller."""
    return -(-total // resolved_group_size(group_size, total))


def units_of(positions: range, per_unit: int) -> range:
    """Return the packed units, of `per_unit` positions each, that contain these positions."""
    return range(positions.start // per_unit, -(-positions.stop // per_unit))


VALUES_PER_UNIT = 32
"""Values without gaps between them that fill whole integers of 32 bits, whatever their width."""


def unpack_dense(packed: Tensor, bits: int) -> Tensor:
    """Return the unsigned values of a row of bits, the lowest ones first, [N, U * 32] int32.

    packed: int32 [N, U * bits]; the last unit may lack integers.
    """
    units = packed.new_zeros(len(packed), -(-packed.shape[1] // bits), bits)
    units.flatten(1)[:, : packed.shape[1]] = packed
    values = units.new_empty(*units.shape[:2], VALUES_PER_UNIT)
    for index in range(VALUES_PER_UNIT):
        word, shift = divmod(index * bits, 32)
        found = units[:, :, word] >> shift & (2 ** min(bits, 32 - shift) - 1)
        if shift + bits > 32:
            found |= units[:, :, word + 1] << (32 - shift) & (2**bits - 1)
        values[:, :, index] = found
    return values.flatten(1)


def as_slice(part: range) -> slice:
    """Return a range as the window of a tensor."""
    return slice(part.start, part.stop)


def require_shape(tensors: TensorSource, name: str, shape: tuple[int, ...]) -> None:
    """Raise UnsupportedModelError for a stored tensor of another shape."""
    if (found := tensors.shape(name)) != shape:
        raise UnsupportedModelError(f"{name} has shape {list(found)}; expected {list(shape)}")
