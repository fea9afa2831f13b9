"""Engines at a pool of draft workers on real sockets: moves for load, and from stopped workers."""

import math
from dataclasses import replace

import pytest

from cluster.workers.groups import worker_group
from cluster.workers.groups.step_deadline import MIN_SAMPLES
from cluster.workers.shared_draft import shared_draft_loop
from cluster.workers.shared_draft.draft_shares import SeatUse
from cluster.workers.shared_draft.drafter_choice import Drafter
from cluster.workers.shared_draft.pool_supervisor import PoolSupervisor
from cluster.workers.transport.transport import has_message
from specdec.speculation.proposers import DraftVocabulary
from specdec.types.errors import DraftFailedError
from tests.clock import Clock
from tests.cluster.workers.shared_draft.test_shared_draft_loop import (
    drafts_of,
    expected,
    in_turns,
    requests,
    wait_until,
)
from tests.cluster.workers.shared_drafts import LIMITS, ThreadedWorker, engine_of, spec_of


class Pool:
    """Threaded workers by name, and what Routers see of them."""

    def __init__(self, model_dir, names, **options):
        self.workers = {name: ThreadedWorker(model_dir, **options) for name in names}
        self.seen = {name: Drafter(name, 0, 1.0, 0.0) for name in names}
        self.use = SeatUse(1.0, 0.01)
        self.num_takes = 0  # of seats at any worker

    def num_blocks(self, timeout_s):
        return LIMITS.num_blocks

    def take(self, request, timeout_s):
        self.num_takes += 1
        for drafter in self.seen.values():
            if (seat := self.take_at(drafter, request)) is not None:
                return seat
        raise DraftFailedError("no seat")

    def take_at(self, drafter, request):
        worker, options = self.workers[drafter.name], {"is_move": request.is_move}
        assert request.num_blocks == LIMITS.num_blocks
        key, most_taken = request.public_key, drafter.num_others
        return worker.admit(key, most_taken, name=drafter.name, **options)

    def look(self, seat):
        return list(self.seen.values()), self.use

    def num_taken(self):
        return {name: each.loop.num_taken for name, each in self.workers.items()}


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(params=["ipc"])
def pool(tiny_model_dir, monkeypatch, request):
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.1")
    monkeypatch.setattr(
        "cluster.workers.shared_draft.pool_supervisor._LOOK_PERIOD_S", 3600.0
    )  # the tests look
    pool = Pool(tiny_model_dir, "ab", transport=request.param)
    yield pool
    for each in pool.workers.values():
        each.stop()


@pytest.fixture
def proposer(tiny_model_dir, pool, clock):
    proposer = PoolSupervisor(pool, spec_of(tiny_model_dir), DraftVocabulary(), clock)
    yield proposer
    proposer.close()


def run(engine, own=(), num_steps=1000):
    return in_turns([engine], [own], num_steps)[0]


@pytest.mark.parametrize("mode", ["off", "outcomes"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_router_moves_between_two_steps_with_the_same_tokens(
    tiny_model_dir, pool, proposer, clock, mode, temperature
):
    engine = engine_of(tiny_model_dir, proposer, mode)
    tokens = run(engine, requests(0, temperature), num_steps=4)
    pool.seen["a"] = Drafter("a", 1, 0.4, 0.0)
    proposer._profiled = proposer._group
    for _ in range(3):
        assert pool.num_taken() == {"a": 1, "b": 0}
        proposer.look()
    assert pool.num_taken() == {"a": 1, "b": 1}, "the new seat comes before the end of the old"
    before = drafts_of(engine).num_draft_tokens
    for name, token_ids in run(engine).items():
        tokens[name].extend(token_ids)
    assert tokens == expected(tiny_model_dir, 0, temperature)
    assert drafts_of(engine).num_draft_tokens > before, "it drafts there"
    assert proposer.num_moves == 1
    assert proposer.num_restarts == 0
    assert proposer.collect_profile() == (), "it ends with the seat"
    wait_until(lambda: pool.num_taken() == {"a": 0, "b": 1})
    pool.seen = {"a": Drafter("a", 0, 1.0, 0.0), "b": Drafter("b", 1, 0.4, 0.0)}
    for _ in range(5):
        proposer.look()
    assert pool.num_taken() == {"a": 0, "b": 1}, "it stays for a while"
    clock.now_s += 11
    proposer.look()
    proposer.check()  # also without a step
    assert proposer.num_moves == 2


def test_a_router_leaves_a_worker_that_stops_and_its_steps_wait_once(
    tiny_model_dir, pool, proposer, clock
):
    engine = engine_of(tiny_model_dir, proposer)
    tokens = run(engine, requests(0))
    assert tokens == expected(tiny_model_dir, 0)
    patience = proposer._group.patience
    for _ in range(MIN_SAMPLES):
        patience.record(1, 0.01)
    stopped = pool.workers["a"]
    wait_until(lambda: stopped.loop.num_taken == 1)
    stopped.pause()
    found = run_without_answers(engine, requests(1), num_steps=6)
    assert proposer.num_late_drafts == 1, "only the first step waits"
    proposer.look()
    assert pool.num_taken()["b"] == 0, "it may still answer"
    let_a_second_pass(proposer._group)
    proposer.check()
    pool.look = None  # the worker would not answer
    proposer.look()
    assert pool.num_taken()["b"] == 1
    for name, token_ids in run(engine).items():
        found.setdefault(name, []).extend(token_ids)
    assert found == expected(tiny_model_dir, 1)
    assert proposer.num_moves == 1
    assert proposer._group.patience is patience, "what it has learned applies to the new one"
    stopped.resume()
    wait_until(lambda: pool.num_taken() == {"a": 0, "b": 1})


def let_a_second_pass(group):
    """Set the clock of a group to a second after it has sent its step."""
    now_s = group._pending[0].sent_s + 1
    group._clock = lambda: now_s


def test_a_router_stays_at_a_worker_whose_late_drafts_have_arrived(tiny_model_dir, pool, proposer):
    engine, group = engine_of(tiny_model_dir, proposer), proposer._group
    run(engine, requests(0))
    proposer.look()
    for _ in range(MIN_SAMPLES):
        group.patience.record(1, 0.01)
    pool.workers["a"].pause()
    run_without_answers(engine, requests(1), num_steps=2)
    assert proposer.num_late_drafts == 1
    pool.workers["a"].resume()
    [socket] = group._sockets
    wait_until(lambda: has_message(socket))
    let_a_second_pass(group)
    proposer.look()
    assert pool.num_taken()["b"] == 0, "its answer is not read yet"

    def is_read():  # the first message may be that of a catch-up step, which it answers too
        proposer.check()  # also without a step
        return group._num_late == 0

    wait_until(is_read)
    assert group.late_s == 0
    proposer.look()
    assert pool.num_taken()["b"] == 0


def test_a_router_that_has_moved_does_not_leave_for_its_own_worker(pool, proposer):
    """The look before the move has the worker as another one."""
    pool.seen["a"], pool.seen["b"] = Drafter("a", 1, 0.3, 0.0), Drafter("b", 1, 1.0, 0.0)
    for _ in range(3):
        proposer.look()
    seen = proposer._others
    proposer.check()
    assert proposer._group.ranks.seat.drafter == "b"
    wait_until(lambda: pool.num_taken() == {"a": 0, "b": 1})
    assert proposer._others == [], "of another worker"
    proposer._group.late_s, pool.seen = 1.0, {"b": pool.seen["b"]}
    proposer.look()
    proposer._others = seen  # as where a restart takes a seat during a look
    proposer.look()
    assert pool.num_taken() == {"a": 0, "b": 1}
    assert proposer._next is None


@pytest.mark.parametrize("pool", ["tcp"], indirect=True)
def test_a_router_notices_the_end_of_a_worker_that_was_late(tiny_model_dir, pool, proposer):
    engine = engine_of(tiny_model_dir, proposer)
    run(engine, requests(0))
    patience, stopped = proposer._group.patience, pool.workers["a"]
    for _ in range(MIN_SAMPLES):
        patience.record(1, 0.01)
    stopped.pause()
    run_without_answers(engine, requests(1), num_steps=3)
    assert proposer.num_late_drafts == 1
    [seat] = stopped.loop._seats.values()
    seat.socket.close()  # as the end of its process does
    del pool.seen["a"]
    wait_until(proposer._group._sockets[0].poll_lost)
    engine.step()
    wait_until(lambda: proposer.num_restarts)
    stopped.resume()


def run_without_answers(engine, own, num_steps):
    """Run steps without waiting for what the worker sends between them."""
    tokens = {}
    for each in own:
        engine.add(each)
    for _ in range(num_steps):
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens


def test_a_router_leaves_a_worker_that_serve_stops(tiny_model_dir, pool, proposer):
    engine = engine_of(tiny_model_dir, proposer)
    tokens = run(engine, requests(0), num_steps=4)
    own = pool.seen.pop("a")
    proposer.look()
    pool.seen["a"] = own
    proposer.look()
    del pool.seen["a"]
    proposer.look()
    assert pool.num_taken()["b"] == 0, "a single report may be late"
    proposer.look()
    assert pool.num_taken()["b"] == 1
    for name, token_ids in run(engine).items():
        tokens[name].extend(token_ids)
    assert tokens == expected(tiny_model_dir, 0)
    wait_until(lambda: pool.num_taken() == {"a": 0, "b": 1})
    assert (proposer.num_moves, proposer.num_restarts) == (1, 0)


@pytest.mark.parametrize("pool", ["ipc", "tcp"], indirect=True)
def test_a_router_whose_worker_ends_takes_a_seat_at_another(
    tiny_model_dir, pool, proposer, monkeypatch, caplog
):
    """It waits neither for a reason, which Ray reports to no Router, nor for a periodic check."""
    monkeypatch.setattr(worker_group, "_REASON_TIMEOUT_S", 3600.0)
    monkeypatch.setattr(worker_group, "_LIVENESS_CHECK_PERIOD_MS", 3_600_000)
    proposer._group.patience._max_s = math.inf
    engine = engine_of(tiny_model_dir, proposer)
    tokens = run(engine, requests(0), num_steps=4)
    pool.workers["a"].stop()
    for name, token_ids in run(engine).items():
        tokens[name].extend(token_ids)
    assert tokens == expected(tiny_model_dir, 0)
    wait_until(lambda: proposer.num_restarts)
    [reason] = [text for text in caplog.messages if "going on without drafts" in text]
    assert "did not answer in time" not in reason
    assert pool.num_taken() == {"a": 1, "b": 1}
    assert proposer.num_moves == 0


@pytest.mark.parametrize(("b_is_full", "num_takes"), [(False, 1), (True, 2)])
def test_a_router_that_loses_its_worker_first_tries_those_of_its_last_look(
    pool, proposer, b_is_full, num_takes
):
    proposer.look()
    pool.workers["a"].stop()
    if b_is_full:
        pool.seen["c"], pool.workers["c"] = Drafter("c", 0, 1.0, 0.0), pool.workers["b"]
        pool.workers["b"] = pool.workers["a"]
    wait_until(lambda: proposer.check() or proposer.num_restarts)
    assert proposer._group.ranks.seat.drafter == ("c" if b_is_full else "b")
    assert pool.num_takes == num_takes, "the first one is that of the start"


@pytest.mark.parametrize("error", [DraftFailedError("no answer in time"), ConnectionRefusedError()])
def test_a_router_whose_new_worker_does_not_answer_tries_the_next(
    pool, proposer, monkeypatch, error
):
    pool.seen["c"], pool.workers["c"] = Drafter("c", 1, 1.0, 0.0), pool.workers["b"]
    proposer.look()
    connect, tried = proposer._connect, []

    def connect_unless_b(seat, keys):
        tried.append(seat.drafter)
        if seat.drafter == "b":
            raise error
        return connect(seat, keys)

    monkeypatch.setattr(proposer, "_connect", connect_unless_b)
    pool.workers["a"].stop()
    wait_until(lambda: proposer.check() or proposer.num_restarts)
    assert tried == ["b", "c"]
    assert pool.num_takes == 1, "that of the start"


def test_a_seat_that_was_opened_while_the_other_was_lost_is_given_back(pool, proposer):
    pool.seen["a"] = Drafter("a", 1, 0.4, 0.0)
    proposer._start = lambda: (_ for _ in ()).throw(DraftFailedError("no seat"))
    for _ in range(3):
        proposer.look()
    opened = proposer._next  # otherwise its socket would be closed in any case
    proposer.mark_lost()
    proposer.check()
    wait_until(lambda: pool.num_taken() == {"a": 0, "b": 0})
    assert opened is not None
    assert proposer.num_moves == 0


def test_a_worker_admits_routers_one_after_the_other(tiny_model_dir):
    clock = Clock()
    worker = ThreadedWorker(tiny_model_dir, num_seats=4, clock=clock)
    try:
        assert worker.admit(b"k", 0, is_move=True) is not None
        assert worker.admit(b"k", 0) is None, "another one was faster"
        assert worker.admit(b"k", 1, is_move=True) is None, "its use is not measured yet"
        assert worker.admit(b"k", 1) is not None, "this one has no other seat"
        clock.now_s += shared_draft_loop._SETTLE_S
        assert worker.admit(b"k", 2, is_move=True) is not None
    finally:
        worker.stop()


def test_a_seat_opened_during_a_restart_is_given_back(tiny_model_dir, pool, monkeypatch):
    supervisor = PoolSupervisor(pool, spec_of(tiny_model_dir), DraftVocabulary())
    try:
        lost, connect = supervisor._group, supervisor._connect

        def connect_late(seat, keys):
            supervisor._group = None  # lost, as a restart would do meanwhile
            return connect(seat, keys)

        monkeypatch.setattr(supervisor, "_connect", connect_late)
        assert supervisor._open(pool.seen["b"], lost, is_move=False)
        assert supervisor._next is None
        wait_until(lambda: pool.num_taken()["b"] == 0)
        lost.kill()
    finally:
        supervisor.close()


def test_a_worker_that_stops_after_it_has_admitted_a_router_holds_it_for_a_step(
    tiny_model_dir, pool
):
    spec = replace(spec_of(tiny_model_dir), start_timeout_s=3600.0, step_timeout_s=0.2)
    pool.workers["a"].pause()
    with pytest.raises(DraftFailedError, match="did not answer in time"):
        PoolSupervisor(pool, spec, DraftVocabulary())
    pool.workers["a"].resume()
