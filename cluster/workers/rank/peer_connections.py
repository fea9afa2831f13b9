"""Connections between the ranks of a group that are on several nodes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import zmq

from cluster.workers.transport.transport import CurveKeys, Endpoint, Listener, StepSocket, connect

MAX_MESSAGE_BYTES = 2**20
"""Limit of a message. A heartbeat is sent after the message before it, whose transfer has to take
less than the timeout of heartbeats."""

_FIRST = [b"connected"]
_CHECK_PERIOD_MS = 100
_DRAIN_PERIOD_S = 1.0


class PeerConnections:
    """One rank's ends of an encrypted socket with every other rank, each for that rank's key only.

    A rank listens for those after it, and connects to those before it.
    """

    def __init__(self, rank: int, address: str) -> None:
        """Generate the keys. address: of this node, on which alone the rank listens.

        store: listener of `open_store`.
        """
        self.address = address
        self.store: socket.socket | None = None
        self._rank = rank
        self._keys = CurveKeys.generate()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._listeners: list[Listener] = []  # for the ranks after this one
        self._sockets: dict[int, StepSocket] = {}
        self._is_closed = threading.Event()
        self._drain = threading.Thread(target=self._poll_lost, daemon=True)

    @property
    def public_key(self) -> bytes:
        """The key by which the other ranks know this one."""
        return self._keys.public

    def open_store(self) -> tuple[str, int]:
        """Listen for the rendezvous of ranks on GPUs, which rank 0 serves; return where."""
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        self.store = socket.create_server((self.address, 0), family=family)
        return self.address, self.store.getsockname()[1]

    def listen(self, public_keys: Sequence[bytes]) -> list[Endpoint]:
        """Listen for the ranks after this one; return where, in their order. Keys are by rank."""
        no_path = Path()  # of a Unix socket
        self._listeners = [
            Listener(
                *("tcp", self.address, key, no_path),
                polls_lost=True,
                max_message_bytes=MAX_MESSAGE_BYTES,
            )
            for key in public_keys[self._rank + 1 :]
        ]
        self._drain.start()
        return [each.endpoint for each in self._listeners]

    def _poll_lost(self) -> None:
        """Process the events of the listeners, which any host that can reach them can cause.

        They would use up the memory of ranks that wait for a step, and poll nothing.
        """
        while not self._is_closed.wait(_DRAIN_PERIOD_S):
            for each in self._listeners:
                each.poll_lost()

    def connect(self, endpoints: Sequence[Endpoint], timeout_s: float) -> dict[int, StepSocket]:
        """Return sockets by rank, all connected.

        endpoints: of this rank at those before it. Waits for a first message of each rank after it,
        before which a bound socket cannot send. Raises RuntimeError; see `receive_from`.
        """
        for rank, endpoint in enumerate(endpoints):
            self._sockets[rank] = connect(
                self._context, endpoint, self._keys, 0.0, max_message_bytes=MAX_MESSAGE_BYTES
            )
            self._sockets[rank].send(_FIRST)
        ends_at_s = time.monotonic() + timeout_s
        for rank, listener in enumerate(self._listeners, self._rank + 1):
            self._sockets[rank] = listener.accept()
            receive_from(rank, self._sockets[rank], ends_at_s - time.monotonic())
        return self._sockets

    def close(self) -> None:
        """Close all sockets."""
        self._is_closed.set()
        if self._drain.is_alive():
            self._drain.join()
        for rank in range(self._rank):
            if rank in self._sockets:
                self._sockets[rank].close()
        for listener in self._listeners:
            listener.close()
        self._context.term()


def receive_from(rank: int, peer: StepSocket, timeout_s: float) -> list[bytes]:
    """Return the next message of a rank. Raises RuntimeError if it is lost, or sends none."""
    pollable = peer.pollable
    assert isinstance(pollable, zmq.Socket), "sockets between nodes use TCP"
    ends_at_s = time.monotonic() + timeout_s
    while not pollable.poll(_CHECK_PERIOD_MS):
        if peer.poll_lost():
            raise lost(rank)
        if time.monotonic() > ends_at_s:
            raise RuntimeError(f"rank {rank} has sent nothing within {timeout_s:g} s")
    return peer.receive()


def lost(rank: int) -> RuntimeError:
    """Return the error for a rank whose connection has ended."""
    return RuntimeError(f"rank {rank} has ended, or cannot be reached")
