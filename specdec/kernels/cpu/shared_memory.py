"""Collectives of ranks on one node, through memory that they share."""

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
"""What can be summed, by reduce.cpp's numbers. Half precisions are added up in float32."""


class SharedMemory:
    """A rank's part in the collectives of processes that share memory, on CPU tensors.

    Sums are in the order of the ranks, so they are the same bits on each of them. A rank waits
    awake for a moment, then asleep. Every rank calls the same collectives in the same order; where
    a peer ends, does not come in time, or calls another one, all that wait for it get a
    RuntimeError, and the group is of no further use. One thread of a rank calls at a time.
    """

    def __init__(
        self, library: ctypes.CDLL, rank: int, size: int, address: Path, timeout_s: float
    ) -> None:
        """Returns when every rank has come to `address`, as `shared_region` says.

        library: the native kernels. timeout_s: how long a rank waits for others, here and later. A
        peer that has ended is noticed within a tenth of a second.
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
        """The address of the `Reducer`, for kernels that reduce on their own."""
        assert self._communicator is not None, "used after close"
        return self._communicator

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums `tensor` over the ranks, in place. Raises TypeError for kinds not in `_ELEMENT_TYPES`."""
        if tensor.dtype not in _ELEMENT_TYPES:
            kinds = ", ".join(str(dtype) for dtype in _ELEMENT_TYPES)
            raise TypeError(f"dtype is {tensor.dtype}; it must be one of {kinds}")
        whole = tensor.contiguous()
        self._raise(
            self._library.specdec_all_reduce(
                self.communicator, _ELEMENT_TYPES[tensor.dtype], whole.data_ptr(), whole.numel()
            )
        )
        if whole is not tensor:
            tensor.copy_(whole)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Every rank's `tensor` (equal shapes, any dtype), [size, *tensor.shape]."""
        own = tensor.contiguous()
        gathered = own.new_empty(self._size, *own.shape)
        self._raise(
            self._library.specdec_all_gather(
                self.communicator, own.data_ptr(), own.nbytes, gathered.data_ptr()
            )
        )
        return gathered

    def close(self) -> None:
        """Leaves the group; the others see this rank as ended."""
        if self._communicator is not None:
            self._library.specdec_close_communicator(self._communicator)
            self._communicator = None

    def check(self) -> None:
        """Raises what `all_reduce` would, once a kernel that reduces on its own has failed."""
        self._raise(self._library.specdec_communicator_failure(self.communicator))

    def _raise(self, failure: int) -> None:
        """failure: as reduce.cpp returns it."""
        if failure > 0:
            limit = f"kept the others waiting for {self._timeout_s:g} s"
            raise RuntimeError(f"rank {failure - 1} has ended, or {limit}")
        if failure < 0:
            raise RuntimeError(f"rank {-failure - 1} called another collective than this rank")


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Gives the functions their types, which ctypes would otherwise guess."""
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
