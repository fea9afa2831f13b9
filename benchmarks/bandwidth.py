"""How many bytes a second this machine's memory gives to all cores that read at once.

Readers with little to compute, each an operation of torch that divides its input over the threads,
take turns; the fastest pass of any counts, as any of them proves that the memory can give so much.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

_ROW = 4096
_NUM_ROUNDS = 8
_LARGE_BYTES = 2**31


def read_bandwidth(num_bytes: int) -> float:
    """Bytes a second, reading a buffer of about that size over and over."""
    buffer = torch.ones(num_bytes // (4 * _ROW), _ROW)
    readers = _readers(buffer)
    best_s = min(_seconds(read) for _ in range(_NUM_ROUNDS) for read in readers)
    return buffer.nbytes / best_s


def memory_bandwidth() -> float:
    """Bytes a second, of a buffer that no cache holds."""
    return read_bandwidth(_LARGE_BYTES)


def _readers(buffer: Tensor) -> tuple[Callable[[], object], ...]:
    """Each reads all of `buffer` [rows, _ROW], fp32, once."""
    flat, ones = buffer.view(-1), torch.ones(_ROW)
    integers = flat.view(torch.int64)
    return (lambda: torch.dot(flat, flat), lambda: buffer @ ones, flat.max, integers.max)


def _seconds(read: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    read()
    return time.perf_counter() - started_at
