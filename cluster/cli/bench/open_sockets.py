"""Tracks the open sockets of an HTTP client, to wake threads that block on them."""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

_OPENED = ("connection.connect_tcp.complete", "connection.start_tls.complete")


class OpenSockets:
    """The open sockets of an httpx client.

    Closing the client does not wake a thread that reads from it; shutting down its socket does.
    """

    def __init__(self) -> None:
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._are_shut_down = False
        self._lock = threading.Lock()  # of both

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Record new sockets; the callback of httpx's `trace` extension."""
        if event in _OPENED:
            opened: socket.socket = info["return_value"].get_extra_info("socket")
            with self._lock:
                self._sockets.add(opened)
                is_late = self._are_shut_down
            if is_late:
                _shut_down(opened)

    def shut_down(self) -> None:
        """Shut down all sockets, including those that are still connecting; thread-safe."""
        with self._lock:
            self._are_shut_down = True
            found = tuple(self._sockets)
        for each in found:
            _shut_down(each)


def _shut_down(opened: socket.socket) -> None:
    """Shut down without the TLS closing handshake, which the reading thread would have to serve."""
    with suppress(OSError):  # already closed
        socket.socket.shutdown(opened, socket.SHUT_RDWR)
