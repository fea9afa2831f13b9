"""Messages between a Router and one of its front ends.

They are pickled. The socket is half of a pair that the Router made and the front end, its own child
process, inherited: no other process can connect to it.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
import struct
from collections.abc import Callable, Iterator
from threading import Lock
from typing import Any

logger = logging.getLogger(__name__)

Message = tuple[Any, ...]
"""Its kind, and what belongs to it."""

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 20


class Channel:
    """One end, whose messages arrive on the running event loop. `send` is thread-safe."""

    def __init__(
        self,
        connected: socket.socket,
        on_message: Callable[[Message], None],
        on_lost: Callable[[], None],
    ) -> None:
        """on_lost: called once the other end is closed, not after `close`."""
        self._socket = connected
        self._on_message, self._on_lost = on_message, on_lost
        self._lock = Lock()  # guards the two below
        self._unsent = bytearray()
        self._is_closed = False
        self._unread = bytearray()
        connected.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connected.fileno(), self._read)

    def send(self, *message: Any) -> None:
        """Send a message without blocking; after a loss it is dropped.

        One that cannot be sent is our own fault, and the other end would wait for it: it is a loss.
        """
        try:
            content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        except Exception:
            logger.exception("a message cannot be sent: %s", message[0])
            self._loop.call_soon_threadsafe(self._lose)
            return
        with self._lock:
            if self._is_closed:
                return
            was_empty = not self._unsent
            self._unsent += _LENGTH.pack(len(content))
            self._unsent += content
            if was_empty and not self._write():
                self._loop.call_soon_threadsafe(self._await_room)

    def close(self) -> None:
        """Close this end, once what was sent has been written as far as there is room."""
        with self._lock:
            if self._is_closed:
                return
            self._write()
            self._is_closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()

    def _lose(self) -> None:
        if not self._is_closed:
            self.close()
            self._on_lost()

    def _write(self) -> bool:
        """Write what there is room for; return whether that is all."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return False
        except OSError:
            self._unsent.clear()  # the reader notices the loss
        return True

    def _await_room(self) -> None:
        if not self._is_closed:
            self._loop.add_writer(self._socket.fileno(), self._write_rest)

    def _write_rest(self) -> None:
        with self._lock:
            if self._write():
                self._loop.remove_writer(self._socket.fileno())

    def _read(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._lose()
            return
        self._unread += data
        try:
            for message in self._take_messages():
                self._handle(message)
        except Exception:
            logger.exception("a message cannot be read")
            self._lose()

    def _handle(self, message: Message) -> None:
        try:
            self._on_message(message)
        except Exception:
            logger.exception("a message was not handled: %s", message[0])

    def _take_messages(self) -> Iterator[Message]:
        """Yield the messages that are complete."""
        unread, start = self._unread, 0
        while len(unread) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(unread, start)
            end = start + _LENGTH.size + length
            if len(unread) < end:
                break
            with memoryview(unread)[start + _LENGTH.size : end] as content:
                message = pickle.loads(content)  # noqa: S301  # of our own process: see above
            start = end
            yield message
        del unread[:start]
