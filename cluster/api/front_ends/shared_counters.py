"""Counters in memory that all front ends of a Router map, so that limits hold for all together."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Sequence
from functools import partial

from cluster.api.base.authentication import ApiKey, ApiKeys
from cluster.api.base.byte_budget import ByteBudget
from cluster.api.base.counters import KeyCounters
from cluster.config.serve_config import ServeConfig

_CELL_BYTES = 8
_BYTES_COUNTER = 0
"""Number of the counter of bytes in progress; those of the keys follow."""
_NUM_CELLS = 1
"""Cells before the table: the sequences of the engine."""


class SharedCounters:
    """A table of counters with a row for each front end, followed by a bucket for each key.

    A process adds to its own row: a front end, or the Router in the last one. When a front end has
    ended, the Router clears its row.
    """

    def __init__(self, descriptor: int, num_rows: int, num_keys: int) -> None:
        """descriptor: of memory that `create` made, in this process or its parent."""
        self.descriptor, self.num_rows, self.num_keys = descriptor, num_rows, num_keys
        memory = mmap.mmap(descriptor, _num_bytes(num_rows, num_keys))
        cells = memoryview(memory)
        first, split = _CELL_BYTES, (_NUM_CELLS + num_rows * (1 + num_keys)) * _CELL_BYTES
        self._num_sequences = cells[:first].cast("q")
        self._counts = cells[first:split].cast("q")
        self._buckets = cells[split:]
        self._lock = _FileLock(descriptor)

    @classmethod
    def create(cls, num_rows: int, num_keys: int) -> SharedCounters:
        """Make counters of zero, and empty buckets."""
        descriptor = os.memfd_create("counters")
        os.ftruncate(descriptor, _num_bytes(num_rows, num_keys))
        return cls(descriptor, num_rows, num_keys)

    @property
    def num_sequences(self) -> int:
        """Sequences that the engine runs or that wait, as the Router last wrote it."""
        return self._num_sequences[0]

    @num_sequences.setter
    def num_sequences(self, count: int) -> None:
        self._num_sequences[0] = count

    def clear(self, row: int) -> None:
        """Set the counters of a front end that has ended to zero."""
        width = 1 + self.num_keys
        for index in range(row * width, (row + 1) * width):
            self._counts[index] = 0

    def close(self) -> None:
        """Close the descriptor; the memory remains mapped."""
        os.close(self.descriptor)

    def limits(
        self, row: int, keys: Sequence[ApiKey], config: ServeConfig
    ) -> tuple[ApiKeys, ByteBudget]:
        """Return the limits of a process, which hold for all of them together."""
        budget = ByteBudget(config.max_inflight_mib * 2**20, self.bytes_of(row))
        own = partial(self.key, row)
        return ApiKeys(keys, min_priority=config.min_priority, counters=own), budget

    def bytes_of(self, row: int) -> SharedCounter:
        """Return the counter of the bytes in progress, for a front end."""
        return self._counter(row, _BYTES_COUNTER)

    def key(self, row: int, key: int) -> KeyCounters:
        """Return the counters of a key, for a front end."""
        running = self._counter(row, 1 + key)
        start = key * ctypes.sizeof(SharedBucket)
        return KeyCounters(running, SharedBucket.from_buffer(self._buckets, start), self._lock)

    def _counter(self, row: int, number: int) -> SharedCounter:
        width = 1 + self.num_keys
        column = range(number, self.num_rows * width, width)
        return SharedCounter(self._counts, column, own=column[row])


class SharedCounter:
    """A counter of which each front end has its part."""

    def __init__(self, counts: memoryview[int], column: range, own: int) -> None:
        """column: the cells of all front ends. own: that of this one."""
        self._counts, self._column, self._own = counts, column, own

    @property
    def total(self) -> int:
        """See Counter."""
        return sum(self._counts[each] for each in self._column)

    def add(self, count: int) -> None:
        """See Counter."""
        self._counts[self._own] += count


class SharedBucket(ctypes.Structure):
    """A token bucket of all front ends together, in their memory; see `Bucket`."""

    remaining: float
    filled_at_s: float
    _fields_ = (("remaining", ctypes.c_double), ("filled_at_s", ctypes.c_double))


class _FileLock:
    """A lock between processes, for one thread of each. A process that ends releases it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __enter__(self) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)

    def __exit__(self, *error: object) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN)


def _num_bytes(num_rows: int, num_keys: int) -> int:
    return (_NUM_CELLS + num_rows * (1 + num_keys) + 2 * num_keys) * _CELL_BYTES
