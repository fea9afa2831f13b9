"""Collectives of the ranks of one node, through shared memory."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch
from torch import Tensor

from specdec.kernels.cpu.region import shared_region

_ELEMENT_TYPES = {
    torch.float32: 1,
    torch.float64: 2,
    torch.float16: 3,
    torch.bfloat16: 4,
    torch.int32: 5,
    torch.int64: 6,
}
"""Types that can be summed; `ElementType` in allreduce.cpp. 16-bit types are summed in float32."""


class SharedMemory:
    """Collectives of one rank of a group of processes on one node, on CPU tensors.

    Sums are computed in rank order, so they are the same bits on every rank. A waiting rank spins
    briefly, then sleeps. Every rank must call the same collectives in the same order. When a peer
    ends, times out or calls another collective, the ranks that wait for it raise RuntimeError, and
    the group is no longer usable. Not thread-safe.
    """

    def __init__(
        self, library: ctypes.CDLL, rank: int, size: int, address: Path, timeout_s: float
    ) -> None:
        """Join the group; returns when every rank has connected to `address` (`shared_region`).

        timeout_s: limit of each wait for a peer, here and in collectives. The end of a peer is
        detected within 0.1 s.
        """
        self._library = _declare(library)
        self._size = size
        self._timeout_s = timeout_s
        num_bytes = library.specdec_region_bytes(size)
        with shared_region(rank, size, num_bytes, address, timeout_s) as region:
            communicator = library.specdec_open_communicator(region, rank, size, timeout_s)
            if communicator is None:
                os.close(region)
                raise RuntimeError(f"rank {rank} could not map {num_bytes} bytes to share")
            self._communicator: int | None = communicator

    @property
    def communicator(self) -> int:
        """The address of the C++ `Communicator`, for kernels that call collectives themselves."""
        assert self._communicator is not None, "used after close"
        return self._communicator

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum `tensor` over the ranks in place; raise TypeError for types not in _ELEMENT_TYPES."""
        if tensor.dtype not in _ELEMENT_TYPES:
            supported = ", ".join(str(dtype) for dtype in _ELEMENT_TYPES)
            raise TypeError(f"dtype is {tensor.dtype}; it must be one of {supported}")
        contiguous = tensor.contiguous()
        self._raise(
            self._library.specdec_all_reduce(
                self.communicator,
                _ELEMENT_TYPES[tensor.dtype],
                contiguous.data_ptr(),
                contiguous.numel(),
            )
        )
        if contiguous is not tensor:
            tensor.copy_(contiguous)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return every rank's `tensor` (equal shapes, any dtype), [size, *tensor.shape]."""
        own = tensor.contiguous()
        gathered = own.new_empty(self._size, *own.shape)
        self._raise(
            self._library.specdec_all_gather(
                self.communicator, own.data_ptr(), own.nbytes, gathered.data_ptr()
            )
        )
        return gathered

    def close(self) -> None:
        """Leave the group; the peers see this rank as ended."""
        if self._communicator is not None:
            self._library.specdec_close_communicator(self._communicator)
            self._communicator = None

    def check(self) -> None:
        """Raise RuntimeError if a collective of a kernel has failed."""
        self._raise(self._library.specdec_communicator_failure(self.communicator))

    def _raise(self, failure: int) -> None:
        """Raise RuntimeError for a failure code of allreduce.cpp."""
        if failure > 0:
            limit = f"did not respond for {self._timeout_s:g} s"
            raise RuntimeError(f"rank {failure - 1} has ended, or {limit}")
        if failure < 0:
            raise RuntimeError(f"rank {-failure - 1} called another collective than this rank")


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Set the argument and result types; return the library."""
    library.specdec_region_bytes.argtypes = [ctypes.c_int64]
    library.specdec_region_bytes.restype = ctypes.c_int64
    library.specdec_open_communicator.argtypes = [
        ctypes.c_int32,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_double,
    ]
    library.specdec_open_communicator.restype = ctypes.c_void_p
    library.specdec_close_communicator.argtypes = [ctypes.c_void_p]
    library.specdec_close_communicator.restype = None
    library.specdec_communicator_failure.argtypes = [ctypes.c_void_p]
    library.specdec_all_reduce.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int32,
        ctypes.c_void_p,
        ctypes.c_int64,
    ]
    library.specdec_all_gather.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]
    return library
