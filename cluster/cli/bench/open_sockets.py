"""The sockets that an HTTP client has open, so that those who wait on them can be woken."""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

_OPENED = ("connection.connect_tcp.complete", "connection.start_tls.complete")


class OpenSockets:
    """Closing a client does not wake a thread that reads from it; the end of its stream does."""

    def __init__(self) -> None:
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._are_shut_down = False
        self._lock = threading.Lock()  # of both

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """For the `trace` extension of httpx's requests."""
        if event in _OPENED:
            opened: socket.socket = info["return_value"].get_extra_info("socket")
            with self._lock:
                self._sockets.add(opened)
                is_late = self._are_shut_down
            if is_late:
                _shut_down(opened)

    def shut_down(self) -> None:
        """Ends all streams, also of connections that are still being made; from any thread."""
        with self._lock:
            self._are_shut_down = True
            found = tuple(self._sockets)
        for each in found:
            _shut_down(each)


def _shut_down(opened: socket.socket) -> None:
    """Without TLS's own farewell, which the reader would have to take part in."""
    with suppress(OSError):  # it has ended
        socket.socket.shutdown(opened, socket.SHUT_RDWR)
