"""Messages of several frames over a Unix stream socket, between two processes of one node.

A message is its length, the lengths of its frames, and the frames. Both ends sleep in the kernel
and are woken by it; there is no thread in between, as pyzmq has one at each end.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_LENGTH = struct.Struct("<Q")


class PeerGoneError(ConnectionError):
    """The other end has closed, or ended."""


class UnixSocket:
    """One end.

    timeout_s: how long the other one may take nothing of a message, or give nothing; None waits for
    ever. Who has a limit asks a poller first whether a message has begun.
    """

    def __init__(self, connected: socket.socket, timeout_s: float | None = None) -> None:
        self._socket = connected
        connected.settimeout(timeout_s)

    @classmethod
    def connect(cls, path: Path, timeout_s: float) -> UnixSocket:
        """To whoever listens at `path`. Raises OSError where nobody does."""
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            client.connect(str(path))
        except OSError:
            client.close()
            raise
        return cls(client, timeout_s)

    @property
    def pollable(self) -> int:
        """For zmq.Poller: the file descriptor."""
        return self._socket.fileno()

    @property
    def is_lost(self) -> bool:
        """See StepSocket; on one node whoever reads is told."""
        return False

    def send(self, frames: Sequence[bytes]) -> None:
        """Raises PeerGoneError, and TimeoutError where the other end takes nothing."""
        try:
            self._socket.sendall(_encode(frames))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise PeerGoneError("the other end of a step socket has closed") from error

    def send_last(self, frames: Sequence[bytes]) -> None:
        """Sends what nothing follows, if there is room for it and somebody there. Does not wait."""
        with suppress(OSError):
            self._socket.send(_encode(frames), socket.MSG_DONTWAIT)

    def receive(self) -> list[bytes]:
        """The next message. Raises PeerGoneError, and TimeoutError where it does not go on."""
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
        """What was sent still arrives."""
        self._socket.close()

    def _read(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        view = memoryview(data)
        while view:
            try:
                count = self._socket.recv_into(view, len(view), socket.MSG_WAITALL)
            except ConnectionResetError:
                count = 0
            if count == 0:
                raise PeerGoneError("the other end of a step socket has closed")
            view = view[count:]
        return data


def _encode(frames: Sequence[bytes]) -> bytes:
    lengths = struct.pack(f"<{1 + len(frames)}Q", len(frames), *map(len, frames))
    num_bytes = len(lengths) + sum(map(len, frames))
    return b"".join((_LENGTH.pack(num_bytes), lengths, *frames))


class UnixListener:
    """Waits at a path for one peer; whoever may enter its directory may be that."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        self._socket.listen(1)

    def accept(self) -> UnixSocket:
        """Waits for the peer; nobody else can connect from then on."""
        connected, _ = self._socket.accept()
        self.close()
        return UnixSocket(connected)

    def close(self) -> None:
        """Lets nobody in any more."""
        self._socket.close()
