"""Seats of Routers at draft workers that they share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import zmq

from cluster.workers.group_spec import RankPlace
from cluster.workers.groups.ranks import RankLoss
from cluster.workers.transport.transport import CurveKeys, Endpoint, StepSocket, connect


@dataclass(frozen=True)
class SeatRequest:
    """A Router that wants a seat. address: of its node. public_key: of its end of a TCP socket.

    num_blocks: that the Router uses. most_taken: seats that may be taken already, those of the
    report by which the Router has chosen. is_move: whether it has a seat at another worker, and can
    wait.
    """

    address: str
    public_key: bytes
    num_blocks: int
    is_move: bool = False
    most_taken: int = 0


@dataclass(frozen=True)
class Seat:
    """A socket that only the Router can connect to, and the blocks of its part of the KV pool.

    drafter, index: name of the worker, and of the seat there.
    """

    endpoint: Endpoint
    num_blocks: int
    drafter: str
    index: int


class SeatRanks:
    """The rank of a shared draft worker, in place of a Router's own ranks.

    It belongs to others too: a Router that is done with it only closes its socket.
    """

    are_shared = True

    def __init__(self, seat: Seat, keys: CurveKeys, step_timeout_s: float) -> None:
        """keys: whose public key was in the request."""
        self.seat = seat
        self._keys = keys
        self._step_timeout_s = step_timeout_s

    @property
    def places(self) -> Sequence[RankPlace]:
        """Empty: no spare of this Router replaces the rank."""
        return ()

    def connect(self, context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[StepSocket]:
        """Yield the Router's end of the seat's socket. Raises OSError."""
        yield connect(context, self.seat.endpoint, self._keys, self._step_timeout_s)

    def loss(self) -> RankLoss | None:
        """Return None: the end of the worker closes the socket."""
        return None

    def wait_until_ended(self, timeout_s: float) -> None:
        """Return at once: the worker goes on for other Routers."""

    def kill(self) -> None:
        """Do nothing, for the same reason."""
