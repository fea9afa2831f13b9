"""Numbers as the bytes of a frame, little-endian, and back.

Tables with a column of sequence ids have 64-bit integers, since ids are never reused; all other
arrays have 32 bits.

Both ends of a socket pack and unpack between two forward passes, with none of numpy's code in the
CPU caches: numpy arrays are used only for what is rare (docs/adr/0013).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Frames = list[bytes]
"""A message of a socket."""

Numbers = tuple[int, ...]

INT32 = np.dtype("<i4")
FLOAT32 = np.dtype("<f4")
_INT64_BYTES = 8


def pack_table(rows: Iterable[Numbers]) -> bytes:
    """Return rows of 64-bit integers, one after the other."""
    values = tuple(chain.from_iterable(rows))
    return struct.pack(f"<{len(values)}q", *values)


def unpack_table(frame: bytes, num_columns: int) -> list[Numbers]:
    """Return the rows of `pack_table`."""
    values = struct.unpack(f"<{len(frame) // _INT64_BYTES}q", frame)
    return [values[start : start + num_columns] for start in range(0, len(values), num_columns)]


def unpack_columns(frame: bytes, num_columns: int) -> list[Numbers]:
    """Return the columns of `pack_table`."""
    values = struct.unpack(f"<{len(frame) // _INT64_BYTES}q", frame)
    return [values[column::num_columns] for column in range(num_columns)]


def pack_numbers(values: Iterable[int]) -> bytes:
    """Return 32-bit integers."""
    values = tuple(values)
    return struct.pack(f"<{len(values)}i", *values)


def unpack_numbers(frame: bytes, counts: list[int]) -> list[Numbers]:
    """Return the integers of `pack_numbers`, divided into runs of these lengths."""
    values = struct.unpack(f"<{len(frame) // INT32.itemsize}i", frame)
    bounds = accumulate(counts, initial=0)
    return [values[start:end] for start, end in pairwise(bounds)]


def pack_arrays(arrays: Iterable[NDArray[Any] | None], dtype: np.dtype[Any]) -> bytes:
    """Return the elements of all arrays that are present; `array_reader` needs their shapes."""
    return b"".join(each.astype(dtype).tobytes() for each in arrays if each is not None)


def array_reader(frame: bytes, dtype: np.dtype[Any]) -> Callable[..., NDArray[Any]]:
    """Return a function that reads consecutive arrays of given shapes from a frame."""
    position = 0

    def take(*shape: int) -> NDArray[Any]:
        nonlocal position
        start, position = position, position + math.prod(shape) * dtype.itemsize
        return np.frombuffer(memoryview(frame)[start:position], dtype=dtype).reshape(shape)

    return take
