"""Memory for packed weights and for KV, in huge pages where the system has them.

A product reads weights once, from end to end, so with pages of 4 KiB it waits for address
translation: huge pages made it up to 1.3 times as fast (docs/adr/0014). Matrices are smaller than a
few of those pages, so they share them. A page is there once it is written to, and in pages of 4 KiB
a pool of 2 GiB took seconds to be.
"""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor

_HUGE_PAGE = 2**21
_CHUNK_BYTES = 16 * _HUGE_PAGE
_ALIGNMENT = 64


class LargeMemory:
    """Hands out pieces of blocks, or blocks; one goes when no piece of it is in use any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, zeros, aligned to a cache line."""
        if num_bytes >= _CHUNK_BYTES:  # nothing small is to keep all that
            return _new_block(num_bytes)[:num_bytes]
        padded = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            if padded > len(self._free):
                self._free = _new_block(_CHUNK_BYTES)
            piece, self._free = self._free[:num_bytes], self._free[padded:]
        return piece


@cache
def large_memory() -> LargeMemory:
    """This process's."""
    return LargeMemory()


def _new_block(num_bytes: int) -> Tensor:
    """At least so many zeros, from the beginning of a huge page to the end of one."""
    rounded = -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE
    # Memory that is shared, as mmap's is by default, gets huge pages on few systems.
    mapping = mmap.mmap(-1, rounded + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # where the kernel was built without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    block = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -block.data_ptr() % _HUGE_PAGE
    return block[start : start + rounded]
