"""Exchange of tensors between ranks on the CPUs of several nodes."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cluster.workers.rank.peer_connections import MAX_MESSAGE_BYTES, lost, receive_from
from cluster.workers.transport.transport import StepSocket
from cluster.workers.transport.unix_socket import PeerGoneError

Bytes = npt.NDArray[np.uint8]

_HEADER = struct.Struct("<QQ")
"""The number of the message, and the bytes that the collective sends to each rank."""
_PART_BYTES = MAX_MESSAGE_BYTES - _HEADER.size


class PeerExchange:
    """Gathers and scatters CPU tensors over a socket with each other rank; see `Exchange`.

    Every message has a number, so that one that was lost with a connection, which its socket then
    makes again, is noticed.
    """

    def __init__(self, rank: int, sockets: Mapping[int, StepSocket], timeout_s: float) -> None:
        """Take the sockets, by rank; the caller closes them.

        timeout_s: the limit for a rank to send the next message of a collective.
        """
        self._rank, self._sockets, self._timeout_s = rank, sockets, timeout_s
        self._count = 0

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack every rank's `tensor` (equal shapes) to [size, *tensor.shape]."""
        own = tensor.detach().contiguous()
        received = own.new_empty(len(self._sockets) + 1, *own.shape)
        received[self._rank] = own
        row = _bytes_of(own)
        self._exchange(dict.fromkeys(self._sockets, row), _rows_of(received))
        return received

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Send `parts[rank]` to each rank, [size, ...]; return what each rank sent here."""
        own = parts.detach().contiguous()
        received = own.clone()
        rows = _rows_of(own)
        self._exchange({rank: rows[rank] for rank in self._sockets}, _rows_of(received))
        return received

    def describe(self) -> str:
        """Return how tensors are exchanged, for the log."""
        return "encrypted sockets"

    def _exchange(self, sent: Mapping[int, Bytes], received: Bytes) -> None:
        """Send bytes to each other rank, and fill its row of `received`, [size, num_bytes]."""
        num_bytes = received.shape[1]
        for begin in range(0, num_bytes, _PART_BYTES):
            part = slice(begin, begin + _PART_BYTES)
            header = _HEADER.pack(self._count, num_bytes)
            for rank, row in sent.items():
                self._send(rank, header + row[part].data)
            for rank in sent:
                [frame] = receive_from(rank, self._sockets[rank], self._timeout_s)
                if frame[: _HEADER.size] != header:
                    raise RuntimeError(f"rank {rank} called another collective than this rank")
                received[rank, part] = np.frombuffer(frame, np.uint8, offset=_HEADER.size)
            self._count += 1

    def _send(self, rank: int, message: bytes) -> None:
        try:
            self._sockets[rank].send([message])
        except PeerGoneError as error:
            raise lost(rank) from error


def _bytes_of(tensor: Tensor) -> Bytes:
    """Return the memory of a contiguous tensor."""
    memory: Bytes = tensor.view(-1).view(torch.uint8).numpy()
    return memory


def _rows_of(tensor: Tensor) -> Bytes:
    """Return the memory of a contiguous tensor, [rows, num_bytes]."""
    return _bytes_of(tensor).reshape(len(tensor), -1)
