"""Collectives of the ranks of one node, through shared memory."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ctypes import c_double, c_int32, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from specdec.kernels.cpu.build import declare

_CONNECT_PERIOD_S = 0.01
_CREDENTIALS = struct.Struct("3i")  # process, user and group, as SO_PEERCRED gives them
_READY = b"h"
_COMPLETE = b"c"

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
        declare(
            library,
            region_bytes=(c_int64, c_int64),
            open_communicator=(c_void_p, c_int32, c_int64, c_int64, c_double),
            close_communicator=(None, c_void_p),
            communicator_failure=(c_int32, c_void_p),
            all_reduce=(c_int32, c_void_p, c_int32, c_void_p, c_int64, c_int32),
            all_gather=(c_int32, c_void_p, c_void_p, c_int64, c_void_p, c_int32),
            all_to_all=(c_int32, c_void_p, c_void_p, c_int64, c_void_p, c_int32),
        )
        self._library = library
        self._rank, self._size = rank, size
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
                torch.get_num_threads(),
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
                self.communicator,
                own.data_ptr(),
                own.nbytes,
                gathered.data_ptr(),
                torch.get_num_threads(),
            )
        )
        return gathered

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Return what each rank has at this rank's place of its `parts`, of the same shape."""
        own = parts.contiguous()
        received = torch.empty_like(own)
        self._raise(
            self._library.specdec_all_to_all(
                self.communicator,
                own.data_ptr(),
                own.nbytes // self._size,
                received.data_ptr(),
                torch.get_num_threads(),
            )
        )
        return received

    def describe(self) -> str:
        """Return how tensors are exchanged, for the log."""
        return "shared memory"

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


@contextmanager
def shared_region(
    rank: int, size: int, num_bytes: int, address: Path, timeout_s: float
) -> Iterator[int]:
    """Yield a descriptor of `num_bytes` zeros that are the same memory on every rank.

    Rank 0 creates the region and sends its descriptor over a Unix socket at `address`, an unused
    path on this node. Leaving the context waits until all ranks leave it. The memory has no name,
    so it is freed when the last process ends, even by a signal. The caller closes the descriptor.

    Raises RuntimeError or ConnectionError when a rank ends early, TimeoutError when one does not
    connect within `timeout_s`, PermissionError when another user listens at `address`.
    """
    with ExitStack() as stack:
        if rank == 0:
            peers = _accept_all(stack, size - 1, address, timeout_s)
            region = _make_region(num_bytes)
            for peer in peers:
                socket.send_fds(peer, [_READY], [region])
            yield region
            for peer in peers:
                _expect(_READY, peer.recv(1))
            for peer in peers:
                peer.sendall(_COMPLETE)
        else:
            first = stack.enter_context(_connect(address, timeout_s))
            greeting, [*regions], _, _ = socket.recv_fds(first, 1, 1, socket.MSG_CMSG_CLOEXEC)
            _expect(_READY, greeting)
            [region] = regions
            yield region
            first.sendall(_READY)
            _expect(_COMPLETE, first.recv(1))


def _make_region(num_bytes: int) -> int:
    """Create the region with a sealed size, so that no rank can truncate it."""
    region = os.memfd_create("specdec", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(region, num_bytes)
    fcntl.fcntl(region, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return region


def _accept_all(
    stack: ExitStack, count: int, address: Path, timeout_s: float
) -> list[socket.socket]:
    """Accept `count` peers of this user; close connections of other users."""
    deadline_s = time.monotonic() + timeout_s
    peers: list[socket.socket] = []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(address))
        server.listen(count)
        while len(peers) < count:
            server.settimeout(max(_CONNECT_PERIOD_S, deadline_s - time.monotonic()))
            peer, _ = server.accept()
            if _user_of(peer) != os.geteuid():
                peer.close()
                continue
            peer.settimeout(timeout_s)
            peers.append(stack.enter_context(peer))
    return peers


def _connect(address: Path, timeout_s: float) -> socket.socket:
    """Connect to rank 0, and wait until it listens."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(address))
            break
        except (FileNotFoundError, ConnectionRefusedError) as error:
            connection.close()
            if time.monotonic() > deadline_s:
                raise TimeoutError(
                    f"rank 0 did not listen at {address} in {timeout_s} s"
                ) from error
            time.sleep(_CONNECT_PERIOD_S)
    if (user := _user_of(connection)) != os.geteuid():
        connection.close()
        raise PermissionError(f"{address} belongs to user {user}, not to {os.geteuid()}")
    return connection


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def _expect(message: bytes, received: bytes) -> None:
    if received != message:
        raise RuntimeError("a rank ended before all ranks had mapped the shared memory")
