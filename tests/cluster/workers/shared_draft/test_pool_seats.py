# Modules: cluster.workers.shared_draft.draft_seats
"""Seats at a pool of draft workers, as its deployment's handle reaches them."""

from dataclasses import dataclass, field

import pytest
from ray.exceptions import GetTimeoutError, RayError

from cluster.workers.shared_draft.draft_seats import Seat, SeatRequest
from cluster.workers.shared_draft.draft_shares import SeatUse
from cluster.workers.shared_draft.drafter_choice import Drafter
from cluster.workers.shared_draft.pool_seats import PoolSeats, WorkerReport
from cluster.workers.transport.transport import Endpoint
from specdec.types.errors import DraftFailedError
from tests.clock import Clock

HERE, THERE = "10.0.0.1", "10.0.0.2"
REQUEST = SeatRequest(HERE, b"key", num_blocks=60)


@dataclass
class Worker:
    """A worker with seats. num_hidden: of those that are taken, which its reports leave out."""

    name: str
    num_seats: int
    num_blocks: int = 120
    seat_bytes: int | None = None
    address: str = HERE
    uses: dict = field(default_factory=dict)
    num_taken: int = 0
    num_hidden: int = 0
    requests: list = field(default_factory=list)

    def report(self):
        limits, num_taken = (self.num_blocks, self.seat_bytes), self.num_taken - self.num_hidden
        return WorkerReport(self.name, (self.address, 6), *limits, num_taken, self.uses)

    def admit_if_addressed(self, name, request):
        most_taken = min(self.num_seats - 1, request.most_taken)
        if name != self.name or self.num_taken > most_taken or self.num_blocks < request.num_blocks:
            return None
        self.num_taken += 1
        self.requests.append(request)
        return Seat(Endpoint(f"ipc:///{name}"), self.num_blocks, name, self.num_taken - 1)


class Handle:
    """Handle of a deployment; fails while there is no replica."""

    def __init__(self, *workers):
        self.workers, self.num_failures = list(workers), 0
        self.stopped, self.waits_s = [], []

    def broadcast(self, method, *arguments):
        if not self.workers:
            self.num_failures += 1
            raise RayError("no replica")
        answers = [getattr(each, method)(*arguments) for each in self.workers]
        return Answers(answers, [GetTimeoutError()] * len(self.stopped), self.waits_s)


class Answers:
    """late: for workers that do not answer. waits_s: to which the waits for these are added."""

    def __init__(self, answers, late, waits_s):
        self._answers, self._late, self._waits_s = answers, late, waits_s

    def results(self, *, timeout_s, return_exceptions):
        assert timeout_s > 0
        assert return_exceptions
        if self._late:
            self._waits_s.append(timeout_s)
            if len(self._waits_s) == 1:
                raise TimeoutError  # not sent yet
        return [*self._late, RayError("lost"), *self._answers]


def seats_of(*workers, connect=lambda address: 0.004):
    clock = Clock()

    def sleep(seconds):
        clock.now_s += seconds

    return PoolSeats(Handle(*workers), clock, sleep, connect)


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: HERE)


def test_routers_are_spread_over_the_workers():
    workers = Worker("a", 2), Worker("b", 2)
    seats = seats_of(*workers)
    assert [seats.take(REQUEST, 10).drafter for _ in range(4)] == ["a", "b", "a", "b"]
    assert [each.public_key for each in workers[0].requests] == [b"key", b"key"]
    with pytest.raises(DraftFailedError, match="no shared draft worker had a free seat within 10"):
        seats.take(REQUEST, 10)


def test_routers_that_start_together_do_not_all_take_the_same_worker():
    """Each has seen both empty, before the other one had a seat."""
    first, second = Worker("a", 9, num_taken=1, num_hidden=1), Worker("b", 9)
    assert seats_of(first, second).take(REQUEST, 10).drafter == "b"


def test_a_router_waits_for_a_seat_that_becomes_free():
    worker = Worker("a", 1, num_taken=1)
    clock = Clock()

    def sleep(seconds):
        clock.now_s += seconds
        worker.num_taken = int(clock.now_s < 105)

    assert PoolSeats(Handle(worker), clock, sleep).take(REQUEST, 60).endpoint.address
    assert clock.now_s == pytest.approx(105, abs=1)


def test_a_router_sees_its_worker_and_others_by_load_and_distance():
    use = SeatUse(0.5, 0.01)
    near = Worker("near", 9, num_taken=3, uses={1: use, 2: SeatUse(0.25, 0.01)})
    far = Worker("far", 9, num_taken=1, uses={0: SeatUse(0.4, 0.01)}, address=THERE)
    beside = Worker("beside", 9, address=THERE)
    asked, round_trips_s = [], [0.004, 0.009, 0.003, 0.02]

    def connect(address):
        asked.append(address)
        return round_trips_s[len(asked) - 1]

    seats = seats_of(near, far, beside, connect=connect)
    seat = Seat(Endpoint(""), 1, "near", 1)
    for shortest_s in (0.004, 0.004, 0.003, 0.003):
        drafters, own = seats.look(seat)
        assert own == use
        assert drafters == [
            Drafter("near", 2, 0.75, 0.0),
            Drafter("far", 1, 0.6, shortest_s),
            Drafter("beside", 0, 1.0, shortest_s),
        ]
    assert asked == [(THERE, 6)] * 4, "each other node once a look"


def test_round_trips_of_the_last_nodes_are_kept(monkeypatch):
    monkeypatch.setattr("cluster.workers.shared_draft.pool_seats._MAX_NODES", 2)
    worker, round_trips_s = Worker("a", 9), iter([1.0, 2.0, 3.0, 4.0, 5.0])
    seats = seats_of(worker, connect=lambda address: next(round_trips_s))
    found = []
    for worker.address in ("192.0.2.1", "192.0.2.2", "192.0.2.1", "192.0.2.3", "192.0.2.2"):
        [drafter], _ = seats.look(Seat(Endpoint(""), 1, "b", 0))
        found.append(drafter.round_trip_s)
    assert found == [1.0, 2.0, 1.0, 4.0, 5.0], "those of the second node were dropped"


def test_a_distant_worker_is_found_by_a_connection():
    unreachable = PoolSeats(Handle(Worker("a", 1, address="127.0.0.1")))  # port 6 is closed
    [drafter], _ = unreachable.look(Seat(Endpoint(""), 1, "b", 0))
    assert drafter.round_trip_s == float("inf")


def test_the_plan_of_a_router_follows_from_the_smallest_worker():
    seats = seats_of(Worker("a", 1, 90, 2000), Worker("b", 1, 80, 3000))
    assert seats.num_blocks(10) == 80
    assert seats.seat_bytes(10) == 2000
    assert seats_of(Worker("a", 1)).seat_bytes(10) is None


def test_a_seat_waits_for_no_stopped_worker_and_a_report_for_a_second():
    seats = seats_of(Worker("a", 1))
    handle = seats._workers
    handle.stopped.append("b")
    assert seats.take_at(Drafter("a", 0, 1.0, 0.0), REQUEST).drafter == "a"
    assert sum(handle.waits_s) == pytest.approx(0.1)
    del handle.waits_s[1:]
    assert seats.take_at(Drafter("a", 0, 1.0, 0.0), REQUEST) is None, "it has no other seat"
    assert sum(handle.waits_s[1:]) == pytest.approx(1.0)
    del handle.waits_s[1:]
    assert seats.num_blocks(10) == 120
    assert handle.waits_s[1:] == [1.0]


def test_a_router_waits_for_the_first_worker():
    seats = seats_of()
    with pytest.raises(DraftFailedError, match="was warm within 3 s"):
        seats.num_blocks(3)
    assert seats._workers.num_failures > 3


def test_a_worker_whose_seats_are_too_small_is_passed_over():
    small, large = Worker("a", 4, num_blocks=59), Worker("b", 4, num_blocks=60, num_taken=3)
    assert PoolSeats(Handle(small, large)).take(REQUEST, 1.0).drafter == "b"
    assert (small.num_taken, large.num_taken) == (0, 4)
