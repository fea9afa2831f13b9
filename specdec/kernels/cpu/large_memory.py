"""Allocates memory for packed weights and the KV cache, in huge pages where available.

A GEMM with few rows reads all weights once, in order, so with pages of 4 KiB it is bound by TLB
misses: huge pages make it up to 1.3 times as fast (docs/adr/0014). Most matrices are smaller than a
huge page, so they share blocks. Pages are allocated on first write; with pages of 4 KiB, faulting
in a KV cache of 2 GiB took seconds.
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


class HugePageAllocator:
    """Bump allocator over huge-page blocks; a block is freed with its last allocation."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = torch.empty(0, dtype=torch.uint8, device="cpu")

    def allocate(self, num_bytes: int) -> Tensor:
        """Return [num_bytes] uint8, zeros, aligned to a cache line."""
        if num_bytes >= _CHUNK_BYTES:  # separate, so that no small allocation keeps it alive
            return _new_block(num_bytes)[:num_bytes]
        padded = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            if padded > len(self._free):
                self._free = _new_block(_CHUNK_BYTES)
            allocation, self._free = self._free[:num_bytes], self._free[padded:]
        return allocation


@cache
def huge_page_allocator() -> HugePageAllocator:
    """Return the allocator of this process."""
    return HugePageAllocator()


def _new_block(num_bytes: int) -> Tensor:
    """Return at least `num_bytes` zeros that start and end at huge-page boundaries."""
    rounded = -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE
    # MAP_PRIVATE: few systems back shared memory, the default of mmap, with huge pages.
    mapping = mmap.mmap(-1, rounded + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # kernels without transparent huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    block = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -block.data_ptr() % _HUGE_PAGE
    return block[start : start + rounded]
