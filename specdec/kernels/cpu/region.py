"""Memory that the ranks of one node share, and how they come by it."""

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
_HERE = b"h"
_COMPLETE = b"c"


@contextmanager
def shared_region(
    rank: int, size: int, num_bytes: int, address: Path, timeout_s: float
) -> Iterator[int]:
    """Yields a descriptor of `num_bytes` zeros that are the same memory on every rank.

    Rank 0 makes the region and hands it out on a socket at `address`, a path on this node that is
    not in use; leaving the context waits until all ranks do. The memory has no name, so when the
    last process ends nothing is left of it, however it ends. The caller closes the descriptor.

    Raises RuntimeError or ConnectionError when a rank ends meanwhile, TimeoutError when one does
    not come within `timeout_s`, PermissionError when another user answers.
    """
    with ExitStack() as stack:
        if rank == 0:
            peers = _accept_all(stack, size - 1, address, timeout_s)
            region = _make_region(num_bytes)
            for peer in peers:
                socket.send_fds(peer, [_HERE], [region])
            yield region
            for peer in peers:
                _expect(_HERE, peer.recv(1))
            for peer in peers:
                peer.sendall(_COMPLETE)
        else:
            first = stack.enter_context(_connect(address, timeout_s))
            greeting, [*regions], _, _ = socket.recv_fds(first, 1, 1, socket.MSG_CMSG_CLOEXEC)
            _expect(_HERE, greeting)
            [region] = regions
            yield region
            first.sendall(_HERE)
            _expect(_COMPLETE, first.recv(1))


def _make_region(num_bytes: int) -> int:
    """Its size is sealed, so that no rank can pull the memory from under the others."""
    region = os.memfd_create("specdec", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(region, num_bytes)
    fcntl.fcntl(region, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return region


def _accept_all(
    stack: ExitStack, count: int, address: Path, timeout_s: float
) -> list[socket.socket]:
    """The connections of as many peers of this user; others are sent away."""
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
    """Waits for rank 0 to listen."""
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
                raise TimeoutError(f"rank 0 did not come to {address} in {timeout_s} s") from error
            time.sleep(_CONNECT_PERIOD_S)
    if (user := _user_of(connection)) != os.geteuid():
        connection.close()
        raise PermissionError(f"{address} is answered by user {user}, not by {os.geteuid()}")
    return connection


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def _expect(message: bytes, received: bytes) -> None:
    if received != message:
        raise RuntimeError("a rank ended before all of them shared their memory")
