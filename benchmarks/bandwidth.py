"""Memory bandwidth of this machine when all cores read at once.

Several torch operations with little arithmetic, each split over all threads, take turns. The
fastest pass of any operation counts, because any of them is a lower bound of the bandwidth.
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
    """Return the bytes per second of repeated reads of a buffer of about `num_bytes`."""
    buffer = torch.ones(num_bytes // (4 * _ROW), _ROW)
    readers = _readers(buffer)
    best_s = min(_seconds(read) for _ in range(_NUM_ROUNDS) for read in readers)
    return buffer.nbytes / best_s


def memory_bandwidth() -> float:
    """Return the bandwidth of reads that no cache can serve, in bytes per second."""
    return read_bandwidth(_LARGE_BYTES)


def _readers(buffer: Tensor) -> tuple[Callable[[], object], ...]:
    """Return operations that each read all of `buffer` [rows, _ROW] (fp32) once."""
    flat, ones = buffer.view(-1), torch.ones(_ROW)
    integers = flat.view(torch.int64)
    return (lambda: torch.dot(flat, flat), lambda: buffer @ ones, flat.max, integers.max)


def _seconds(read: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    read()
    return time.perf_counter() - started_at
