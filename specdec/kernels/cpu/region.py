"""Creates memory that the ranks of one node share, and passes it to them."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

_CONNECT_PERIOD_S = 0.01
_CREDENTIALS = struct.Struct("3i")  # process, user and group, as SO_PEERCRED gives them
_READY = b"h"
_COMPLETE = b"c"


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
