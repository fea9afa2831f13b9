"""Shared draft workers as a Router sees them: load, distance, seats."""

from __future__ import annotations

import logging
import math
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentBroadcastResponse

from cluster.workers.shared_draft.draft_seats import Seat, SeatRequest
from cluster.workers.shared_draft.draft_shares import SeatUse, share_beside
from cluster.workers.shared_draft.drafter_choice import Drafter, by_expected_cost
from specdec.types.errors import DraftFailedError

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")
Node = tuple[str, int]
"""The address of a node's raylet."""

_ANSWER_TIMEOUT_S = 1.0
"""A stopped worker does not answer, and the others' answers wait for it."""

_NUM_SEAT_POLLS = 20
"""Times in which answers are looked at for a seat, which waits for no stopped worker."""

_POLL_S = 0.5
_NUM_ROUND_TRIPS = 8
_MAX_NODES = 1024
"""Nodes whose round trips are kept, those that were seen last."""


@dataclass(frozen=True)
class WorkerReport:
    """A worker. node: address of its raylet. num_blocks: of each seat.

    seat_bytes: memory that the plan of a Router may count on; None where all are on the CPUs of one
        machine, whose memory the Router divides. num_taken: of its seats. uses: by seat.
    """

    name: str
    node: Node
    num_blocks: int
    seat_bytes: int | None
    num_taken: int
    uses: dict[int, SeatUse]


class PoolSeats:
    """Seats at the draft workers of an application. Call it from a thread without a loop.

    clock, sleep: in seconds.
    """

    def __init__(
        self,
        workers: Any,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        connect: Callable[[Node], float] | None = None,
    ) -> None:
        """workers: a handle of the deployment. connect: returns the seconds of a connection."""
        self._workers = workers
        self._clock = clock
        self._sleep = sleep
        self._connect = connect or partial(_connection_s, clock)
        self._round_trips_s: dict[Node, deque[float]] = {}

    def take(self, request: SeatRequest, timeout_s: float) -> Seat:
        """Return a free seat; wait for one. Raises DraftFailedError after `timeout_s`."""
        ends_at_s = self._clock() + timeout_s
        while True:
            for drafter in by_expected_cost(self._drafters(self._reports())):
                if (seat := self.take_at(drafter, request)) is not None:
                    return seat
            self._wait(ends_at_s, f"no shared draft worker had a free seat within {timeout_s:g} s")

    def take_at(self, drafter: Drafter, request: SeatRequest) -> Seat | None:
        """Return a seat at one worker, or None if it does not give one now."""
        request = replace(request, most_taken=drafter.num_others)
        call = "admit_if_addressed", Seat, drafter.name, request
        seats = self._answers(*call, num_polls=_NUM_SEAT_POLLS)
        return seats[0] if seats else None

    def look(self, seat: Seat) -> tuple[list[Drafter], SeatUse | None]:
        """Return the workers as the Router with a seat sees them, and its use of that one."""
        reports, use = self._reports(), None
        for index, report in enumerate(reports):
            if report.name == seat.drafter:
                others = {**report.uses}
                use = others.pop(seat.index, None)
                reports[index] = replace(report, num_taken=report.num_taken - 1, uses=others)
        return self._drafters(reports), use

    def num_blocks(self, timeout_s: float) -> int:
        """Return the blocks of a seat; wait for a worker. Raises DraftFailedError."""
        return min(each.num_blocks for each in self._first_reports(timeout_s))

    def seat_bytes(self, timeout_s: float) -> int | None:
        """Return the memory that a Router's plan may count on; see WorkerReport."""
        found = [each.seat_bytes for each in self._first_reports(timeout_s)]
        return None if None in found else min(filter(None, found))

    def _drafters(self, reports: Sequence[WorkerReport]) -> list[Drafter]:
        nodes = {each.node for each in reports}
        far = {each: self._round_trip_s(each) for each in nodes}
        return [
            Drafter(each.name, each.num_taken, share_beside(each.uses.values()), far[each.node])
            for each in reports
        ]

    def _round_trip_s(self, node: Node) -> float:
        """Return the shortest round trip to a node of the last ones; 0 to this node."""
        if node[0] == str(ray.util.get_node_ip_address()):
            return 0.0
        known = self._round_trips_s.pop(node, None) or deque(maxlen=_NUM_ROUND_TRIPS)
        self._round_trips_s[node] = known
        for oldest in [*self._round_trips_s][:-_MAX_NODES]:
            del self._round_trips_s[oldest]
        known.append(self._connect(node))
        return min(known)

    def _first_reports(self, timeout_s: float) -> list[WorkerReport]:
        ends_at_s = self._clock() + timeout_s
        while not (reports := self._reports()):
            self._wait(ends_at_s, f"no shared draft worker was warm within {timeout_s:g} s")
        return reports

    def _wait(self, ends_at_s: float, reason: str) -> None:
        if self._clock() >= ends_at_s:
            raise DraftFailedError(reason)
        self._sleep(_POLL_S)

    def _reports(self) -> list[WorkerReport]:
        return self._answers("report", WorkerReport)

    def _answers(
        self, method: str, kind: type[AnswerT], *arguments: Any, num_polls: int = 1
    ) -> list[AnswerT]:
        """Return the answers of a kind that running workers give in time.

        num_polls: within that time, of which the first one with an answer of the kind is the last.
        """
        try:
            responses = self._workers.broadcast(method, *arguments)
            for _ in range(num_polls):
                found, is_complete = _arrived(responses, kind, _ANSWER_TIMEOUT_S / num_polls)
                if found or is_complete:
                    return found
        except (RayError, RayServeException) as error:
            logger.debug("no draft worker answers: %s", error)  # one is starting
        return []


def _arrived(
    responses: DeploymentBroadcastResponse, kind: type[AnswerT], timeout_s: float
) -> tuple[list[AnswerT], bool]:
    """Wait for answers; return those of a kind, and whether no other one is to come."""
    try:
        answers = responses.results(timeout_s=timeout_s, return_exceptions=True)
    except TimeoutError:
        return [], False
    late = [each for each in answers if isinstance(each, TimeoutError)]
    return [each for each in answers if isinstance(each, kind)], not late


def _connection_s(clock: Callable[[], float], node: Node) -> float:
    """Return the seconds until a TCP connection is open, a round trip; infinite if it is not."""
    began_at_s = clock()
    try:
        socket.create_connection(node, _ANSWER_TIMEOUT_S).close()
    except OSError:
        return math.inf
    return clock() - began_at_s
