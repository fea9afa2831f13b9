"""Multi-frame messages over a Unix stream socket, between two processes of one node.

A message is its length, the number and lengths of its frames, and the frames. Both ends block in
the kernel, without the background thread that pyzmq has at each end.
"""

from __future__ import annotations

import os
import socket
import struct
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cluster.workers.transport.brief_calls import receive_now, send_now

_LENGTH = struct.Struct("<Q")

_MAX_PARENT_BYTES = 60
"""The path of a socket has at most 107 bytes, with the names of its directory and itself."""


def parent_of_sockets() -> str:
    """Return the directory for directories of sockets: of temporary files, unless it is too long.

    TMPDIR is, in some jobs and tests.
    """
    given = tempfile.gettempdir()
    return given if len(os.fsencode(given)) <= _MAX_PARENT_BYTES else "/tmp"


class PeerGoneError(ConnectionError):
    """The peer has closed its end, or its process has ended."""


class UnixSocket:
    """One end; see StepSocket.

    timeout_s: the limit for the peer to read or write the next part of a message; None waits
    indefinitely. With a limit, use a poller to wait for the beginning of a message.
    """

    def __init__(self, connected: socket.socket, timeout_s: float | None = None) -> None:
        self._socket = connected
        connected.settimeout(timeout_s)

    @classmethod
    def connect(cls, path: Path, timeout_s: float) -> UnixSocket:
        """Connect to the listener at `path`. Raises OSError if there is none."""
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            client.connect(str(path))
        except OSError:
            client.close()
            raise
        return cls(client, timeout_s)

    @property
    def pollable(self) -> int:
        """The file descriptor, for zmq.Poller."""
        return self._socket.fileno()

    def poll_lost(self) -> bool:
        """See StepSocket; on one node `receive` detects a lost peer."""
        return False

    def send(self, frames: Sequence[bytes]) -> None:
        """Send a message. Raises PeerGoneError, and TimeoutError if the peer does not read."""
        message = _encode(frames)
        num_sent = send_now(self._socket.fileno(), message)
        if num_sent == len(message):
            return
        try:
            self._socket.sendall(memoryview(message)[num_sent:])
        except (BrokenPipeError, ConnectionResetError) as error:
            raise PeerGoneError("the peer of a step socket has closed it") from error

    def send_last(self, frames: Sequence[bytes]) -> None:
        """Send the last message, or drop it if it cannot be sent immediately."""
        self._socket.setblocking(False)  # a timeout would wait for room before the first byte
        with suppress(OSError):
            self._socket.send(_encode(frames))

    def receive(self) -> list[bytes]:
        """Return the next message. Raises PeerGoneError, and TimeoutError if it stops midway."""
        (num_bytes,) = _LENGTH.unpack(self._read(_LENGTH.size))
        rest = memoryview(self._read(num_bytes))
        (count,) = _LENGTH.unpack_from(rest)
        lengths = struct.unpack_from(f"<{count}Q", rest, _LENGTH.size)
        frames, begin = [], _LENGTH.size * (1 + count)
        for length in lengths:
            frames.append(bytes(rest[begin : begin + length]))
            begin += length
        return frames

    def close(self) -> None:
        """Close this end; the peer still receives what was sent."""
        self._socket.close()

    def _read(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        num_received = receive_now(self._socket.fileno(), data)
        view = memoryview(data)[num_received:]
        while view:
            try:
                count = self._socket.recv_into(view, len(view), socket.MSG_WAITALL)
            except ConnectionResetError:
                count = 0
            if count == 0:
                raise PeerGoneError("the peer of a step socket has closed it")
            view = view[count:]
        return data


def _encode(frames: Sequence[bytes]) -> bytes:
    lengths = struct.pack(f"<{1 + len(frames)}Q", len(frames), *map(len, frames))
    num_bytes = len(lengths) + sum(map(len, frames))
    return b"".join((_LENGTH.pack(num_bytes), lengths, *frames))


class UnixListener:
    """Listener for one peer, which can be any process that can access the path's directory."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        self._socket.listen(1)

    @property
    def pollable(self) -> int:
        """The file descriptor, for zmq.Poller: it is ready when the peer connects."""
        return self._socket.fileno()

    def accept(self, timeout_s: float | None = None) -> UnixSocket:
        """Wait for the peer, then stop listening: no other process can connect.

        timeout_s: see UnixSocket.
        """
        connected, _ = self._socket.accept()
        self._socket.close()
        self._socket = connected
        return UnixSocket(connected, timeout_s)

    def poll_lost(self) -> bool:
        """Return False: the end of the peer is detected by calls, see UnixSocket."""
        return False

    def close(self) -> None:
        """Close the connection, or the listening socket before there is one."""
        self._socket.close()
