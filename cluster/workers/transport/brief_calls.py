"""Socket calls that return at once, without giving the interpreter lock away.

Python's own calls release the lock, and a thread that wants it back waits for another busy thread
up to the switch interval. The engine's thread would wait so several times in each step.
"""

from __future__ import annotations

import ctypes
import socket

_LIBC = ctypes.PyDLL(None)  # PyDLL keeps the lock, CDLL would release it
_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
for _function in (_LIBC.send, _LIBC.recv):
    _function.argtypes, _function.restype = (_INT, _POINTER, _SIZE, _INT), ctypes.c_ssize_t
_FLAGS = socket.MSG_DONTWAIT  # Python ignores SIGPIPE


def send_now(descriptor: int, data: bytes) -> int:
    """Send what can be sent immediately; return the number of bytes, 0 also after an error."""
    return max(0, int(_LIBC.send(descriptor, data, len(data), _FLAGS)))


def receive_now(descriptor: int, data: bytearray) -> int:
    """Fill `data`, at least a byte, with what has arrived; return the number of bytes.

    0 also after an error.
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(data))
    return max(0, int(_LIBC.recv(descriptor, address, len(data), _FLAGS)))
