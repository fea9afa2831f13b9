# Modules: cluster.workers.shared_draft.draft_seats, cluster.workers.shared_draft.shared_draft_group
"""Seats at the hosts of draft workers, and a worker that is restarted."""

import threading
import time

import pytest
from ray.exceptions import RayError

from cluster.serve.draft_host import HostReport, HostSeats
from cluster.workers.shared_draft.draft_seats import Seat, SeatRequest, take_ranks
from cluster.workers.shared_draft.shared_draft_group import SharedDraftGroup
from cluster.workers.transport.transport import Endpoint
from specdec.types.errors import DraftFailedError
from tests.clock import Clock
from tests.cluster.workers.shared_drafts import LIMITS, spec_of

REQUEST = SeatRequest("10.0.0.1", b"key")


class Host:
    """A host with seats, as the handle of the deployment reaches it."""

    def __init__(self, host_id, num_seats, num_blocks=120, seat_bytes=None):
        self.host_id, self.num_seats, self.num_blocks = host_id, num_seats, num_blocks
        self.seat_bytes, self.requests = seat_bytes, []
        self.num_taken = 0

    def report(self):
        return HostReport(self.host_id, self.num_taken, self.num_blocks, self.seat_bytes)

    def admit_if_addressed(self, host_id, request):
        if host_id != self.host_id or self.num_taken == self.num_seats:
            return None
        self.num_taken += 1
        self.requests.append(request)
        return Seat(Endpoint(f"ipc:///{host_id}-{self.num_taken}"), self.num_blocks)


class Handle:
    """Handle of a deployment; fails while there is no replica."""

    def __init__(self, *hosts):
        self.hosts, self.num_failures = list(hosts), 0

    def broadcast(self, method, *arguments):
        if not self.hosts:
            self.num_failures += 1
            raise RayError("no replica")
        return Answers([getattr(each, method)(*arguments) for each in self.hosts])


class Answers:
    def __init__(self, answers):
        self._answers = answers

    def results(self, *, timeout_s, return_exceptions):
        assert timeout_s > 0
        assert return_exceptions
        return [RayError("lost"), *self._answers]


def seats_of(handle, clock=None):
    clock = clock or Clock()

    def sleep(seconds):
        clock.now_s += seconds

    return HostSeats(handle, clock, sleep)


def test_routers_are_spread_over_the_workers():
    hosts = Host("a", 2), Host("b", 2)
    seats = seats_of(Handle(*hosts))
    for _ in range(4):
        assert seats.take(REQUEST, 10).num_blocks == 120
    assert [each.num_taken for each in hosts] == [2, 2]
    assert hosts[0].requests == [REQUEST] * 2
    with pytest.raises(DraftFailedError, match="no shared draft worker had a free seat within 10"):
        seats.take(REQUEST, 10)


def test_a_router_waits_for_a_seat_that_becomes_free():
    host = Host("a", 1)
    host.num_taken, clock = 1, Clock()

    def sleep(seconds):
        clock.now_s += seconds
        host.num_taken = int(clock.now_s < 105)

    assert HostSeats(Handle(host), clock, sleep).take(REQUEST, 60).endpoint.address
    assert clock.now_s == pytest.approx(105, abs=1)


def test_the_plan_of_a_router_follows_from_the_smallest_worker():
    seats = seats_of(Handle(Host("a", 1, 90, 2000), Host("b", 1, 80, 3000)))
    assert seats.num_blocks(10) == 80
    assert seats.seat_bytes(10) == 2000
    assert seats_of(Handle(Host("a", 1))).seat_bytes(10) is None


def test_a_router_waits_for_the_first_worker():
    handle = Handle()
    with pytest.raises(DraftFailedError, match="was warm within 3 s"):
        seats_of(handle).num_blocks(3)
    assert handle.num_failures > 3


def test_a_seat_with_fewer_blocks_than_the_router_uses_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.1")
    spec = spec_of(tmp_path)
    assert take_ranks(seats_of(Handle(Host("a", 1))), spec).are_shared
    small = Host("a", 1, LIMITS.num_blocks - 1)
    with pytest.raises(DraftFailedError, match=r"119 blocks now.*120; restart the replica"):
        take_ranks(seats_of(Handle(small)), spec)


class Worker:
    def __init__(self):
        self.reason, self.is_killed = None, False

    def admit(self, request):
        if self.reason:
            raise RayError(self.reason)
        return Seat(Endpoint("ipc:///seat"), 1)

    def num_taken(self):
        return 1

    def loss(self):
        return self.reason

    def kill(self):
        self.is_killed = True


@pytest.fixture
def started(monkeypatch):
    """Return a group and the workers that it has started; the second start fails."""
    monkeypatch.setattr("cluster.workers.shared_draft.shared_draft_group._POLL_S", 0.01)
    workers, starts = [], threading.Semaphore(0)

    def start():
        starts.release()
        if len(workers) == 1 and not getattr(workers[0], "has_failed", False):
            workers[0].has_failed = True
            raise DraftFailedError("no memory")
        workers.append(Worker())
        return workers[-1]

    group = SharedDraftGroup(start)
    monkeypatch.setattr(group._backoff, "base_s", 0.01)
    group.start()
    yield group, workers
    group.close()
    assert all(worker.is_killed for worker in workers)


def test_a_worker_that_ends_is_replaced_and_has_no_seats_meanwhile(started):
    group, workers = started
    assert group.admit(REQUEST) is not None
    assert group.num_taken() == 1
    workers[0].reason = "ended"
    assert group.admit(REQUEST) is None
    ends_at_s = time.monotonic() + 10
    while group.num_restarts == 0:
        assert time.monotonic() < ends_at_s
        time.sleep(0.01)
    assert len(workers) == 2
    assert group.admit(REQUEST) is not None


def test_a_worker_that_does_not_start_at_all_fails_the_host():
    def start():
        raise DraftFailedError("no memory")

    with pytest.raises(DraftFailedError, match="no memory"):
        SharedDraftGroup(start).start()
