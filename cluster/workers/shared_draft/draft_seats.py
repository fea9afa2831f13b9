"""Seats of Routers at draft workers that several of them share, as the Routers see them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import ray
import zmq

from cluster.workers.group_spec import GroupSpec, RankPlace
from cluster.workers.groups.ranks import RankLoss
from cluster.workers.transport.transport import CurveKeys, Endpoint, StepSocket, connect
from specdec.config.engine import DraftLimits
from specdec.types.errors import DraftFailedError


@dataclass(frozen=True)
class SeatRequest:
    """A Router that wants a seat. address: of its node. public_key: of its end of a TCP socket."""

    address: str
    public_key: bytes


@dataclass(frozen=True)
class Seat:
    """A socket that only the Router can connect to, and the blocks of its part of the KV pool."""

    endpoint: Endpoint
    num_blocks: int


class DraftSeats(Protocol):
    """The shared draft workers of a service."""

    def num_blocks(self, timeout_s: float) -> int:
        """Return the blocks of a seat; wait for a worker. Raises DraftFailedError."""

    def take(self, request: SeatRequest, timeout_s: float) -> Seat:
        """Return a free seat; wait for one. Raises DraftFailedError after `timeout_s`."""


class SeatRanks:
    """The rank of a shared draft worker, in place of a Router's own ranks.

    It belongs to others too: a Router that is done with it only closes its socket.
    """

    are_shared = True

    def __init__(self, seat: Seat, keys: CurveKeys, step_timeout_s: float) -> None:
        """keys: whose public key was in the request."""
        self._seat = seat
        self._keys = keys
        self._step_timeout_s = step_timeout_s

    @property
    def places(self) -> Sequence[RankPlace]:
        """Empty: no spare of this Router replaces the rank."""
        return ()

    def connect(self, context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[StepSocket]:
        """Yield the Router's end of the seat's socket. Raises OSError."""
        yield connect(context, self._seat.endpoint, self._keys, self._step_timeout_s)

    def loss(self) -> RankLoss | None:
        """Return None: the end of the worker closes the socket."""
        return None

    def wait_until_ended(self, timeout_s: float) -> None:
        """Return at once: the worker goes on for other Routers."""

    def kill(self) -> None:
        """Do nothing, for the same reason."""


def take_ranks(seats: DraftSeats, spec: GroupSpec) -> SeatRanks:
    """Take a seat for this process. Raises DraftFailedError.

    spec: with the limits by which the Router uses its blocks.
    """
    assert isinstance(spec.limits, DraftLimits), "the spec of a target"
    keys = CurveKeys.generate()
    request = SeatRequest(str(ray.util.get_node_ip_address()), keys.public)
    seat = seats.take(request, spec.start_timeout_s)
    if seat.num_blocks < spec.limits.num_blocks:
        reason = f"a seat has {seat.num_blocks} blocks now, and this replica began with "
        raise DraftFailedError(f"{reason}{spec.limits.num_blocks}; restart the replica")
    return SeatRanks(seat, keys, spec.step_timeout_s)
