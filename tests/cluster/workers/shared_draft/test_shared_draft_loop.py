"""Two engines that share a draft worker: their tokens, their seats, and the loss of either side."""

import time

import pytest
import zmq

from cluster.workers.shared_draft import shared_draft_loop
from cluster.workers.transport.transport import CurveKeys, connect
from specdec.types.draft_messages import DraftStep
from specdec.types.errors import DraftFailedError
from specdec.types.messages import BlockTableDelta
from tests.clock import Clock
from tests.cluster.workers.shared_drafts import (
    LIMITS,
    ProcessWorker,
    ThreadedWorker,
    engine_of,
    supervisor,
)
from tests.specdec.engines import engine_config, local_engine, request, tokens_by
from tests.waiting import wait_until


@pytest.fixture(params=["ipc"])
def worker(tiny_model_dir, request):
    """Yield a worker whose model is the target's: a draft of another text would be rejected."""
    worker = ThreadedWorker(tiny_model_dir, transport=request.param)
    yield worker
    worker.stop()


def requests(engine, temperature=0.8, count=3):
    """Return requests whose texts differ between the engines, with the same sequence ids."""
    return [
        request(
            f"r{index}",
            [5 + engine, 6 + index, *range(20, 40 + 3 * index)],
            seed=10 * engine + index,
            temperature=temperature,
            max_tokens=24,
        )
        for index in range(count)
    ]


def expected(target_dir, engine, temperature=0.8):
    return tokens_by(local_engine(target_dir, engine_config(0)), requests(engine, temperature))


def in_turns(engines, requests_by_engine, num_steps=1000):
    """Run a step of each engine in turn; return the tokens of each by request.

    Between two rounds the worker completes what it was sent: this target is faster than a message.
    """
    tokens = [{} for _ in engines]
    for engine, own in zip(engines, requests_by_engine, strict=True):
        for each in own:
            engine.add(each)
    while num_steps and any(engine.has_work for engine in engines):
        num_steps -= 1
        for engine, found in zip(engines, tokens, strict=True):
            if engine.has_work:
                for output in engine.step():
                    found.setdefault(output.request_id, []).extend(output.token_ids)
        for engine in engines:
            wait_until(lambda group=engine._speculator._proposer._group: has_answered(group))
    return tokens


def has_answered(group):
    """Return whether a group has answered everything, or is lost."""
    if group is None:
        return True
    try:
        group._has_answer()
    except DraftFailedError:
        return True
    num_expected = len(group._pending_ahead) + group._num_catching_up
    return len(group._received) >= num_expected or bool(group._closed_at_s)


@pytest.fixture
def routers(tiny_model_dir, worker):
    """Return a function that makes proposers, which are closed."""
    made = []

    def make(count=2):
        made.extend(supervisor(tiny_model_dir, worker.seat_ranks) for _ in range(count))
        return made[-count:]

    yield make
    for each in made:
        each.close()


def drafts_of(engine):
    return engine.stats().counts.speculation


@pytest.mark.parametrize("mode", ["off", "continuing", "outcomes"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_both_engines_have_the_tokens_of_no_speculation(tiny_model_dir, routers, mode, temperature):
    engines = [engine_of(tiny_model_dir, each, mode) for each in routers()]
    own = [requests(engine, temperature) for engine in range(2)]
    tokens = in_turns(engines, own)
    assert tokens == [expected(tiny_model_dir, engine, temperature) for engine in range(2)]
    for engine in engines:
        drafts = drafts_of(engine)
        assert drafts.num_accepted_tokens >= 0.98 * drafts.num_draft_tokens, "of another text"
        assert drafts.num_draft_tokens > 10


@pytest.mark.parametrize("worker", ["tcp"], indirect=True)
def test_routers_on_other_nodes_have_keys(tiny_model_dir, worker, routers):
    [engine] = [engine_of(tiny_model_dir, each, "outcomes") for each in routers(1)]
    assert in_turns([engine], [requests(0)]) == [expected(tiny_model_dir, 0)]


def test_a_router_beyond_the_seats_gets_one_when_another_leaves(tiny_model_dir, worker, routers):
    first, _ = routers()
    with pytest.raises(DraftFailedError, match="taken"):
        worker.seat_ranks()
    first.close()
    wait_until(lambda: worker.loop.num_taken == 1)
    [third] = routers(1)
    engine = engine_of(tiny_model_dir, third)
    assert in_turns([engine], [requests(2)]) == [expected(tiny_model_dir, 2)]


def test_a_router_that_dies_leaves_no_state(tiny_model_dir, worker, routers):
    """Its sequences are released before its seat goes to another one, with the same ids."""
    dying, staying = routers()
    engines = [engine_of(tiny_model_dir, each, "outcomes") for each in (dying, staying)]
    in_turns(engines, [requests(0), requests(1)], num_steps=5)
    dying._group.kill()
    wait_until(lambda: worker.loop.num_taken == 1)
    wait_until(lambda: not worker.loop._left)
    held = worker.runner._batch_state._states
    assert {seq_id % 2 for seq_id in held} == {1}, "sequences of the Router that has died"
    [new] = routers(1)
    [own, others] = in_turns([engines[1], engine_of(tiny_model_dir, new)], [[], requests(2)])
    assert others == expected(tiny_model_dir, 2)
    assert own.keys() == {"r0", "r1", "r2"}, "it goes on"
    assert worker.error is None


@pytest.mark.parametrize("worker", ["tcp"], indirect=True)
def test_an_answer_to_a_router_that_has_left_holds_up_no_other(tiny_model_dir, worker, routers):
    """As after SIGCONT: a Router leaves a worker that is stopped in its step."""
    leaving, staying = routers()
    wait_until(lambda: not worker.loop._running)  # it has answered the last message of `staying`
    worker.pause()
    leaving._group.begin(DraftStep(1, (), (), (), (), ()))
    wait_until(lambda: worker.loop._running)
    [index] = worker.loop._running
    leaving._group.kill()
    wait_until(worker.loop._seats[index].socket.poll_lost)
    worker.resume()
    wait_until(lambda: worker.loop.num_taken == 1)
    engine = engine_of(tiny_model_dir, staying)
    assert in_turns([engine], [requests(0)]) == [expected(tiny_model_dir, 0)]
    assert drafts_of(engine).num_draft_tokens


def test_a_silent_router_loses_its_seat_and_heartbeats_keep_it(worker, routers, monkeypatch):
    monkeypatch.setattr(shared_draft_loop, "_CHECK_PERIOD_MS", 20)
    clock = Clock()
    monkeypatch.setattr(worker.loop, "_clock", clock)
    silent, alive = routers()

    def is_silent_gone():
        alive.check()
        if worker.loop._seats[1].received_at_s == clock.now_s:  # the heartbeat has arrived
            clock.now_s += shared_draft_loop.SEAT_TIMEOUT_S / 4
        return worker.loop.num_taken == 1

    wait_until(is_silent_gone)
    before = silent.num_restarts

    def is_seated_again():
        alive.check()
        silent.check()
        return silent.num_restarts > before

    wait_until(is_seated_again)
    assert alive.is_available
    assert alive.num_restarts == 0


@pytest.mark.parametrize("worker", ["tcp"], indirect=True)
def test_a_router_that_ends_before_its_first_message_loses_its_seat(worker, monkeypatch):
    monkeypatch.setattr(shared_draft_loop, "_CHECK_PERIOD_MS", 20)
    keys = CurveKeys.generate()
    seat = worker.admit(keys.public)

    def is_free():
        with zmq.Context() as context:
            router = connect(context, seat.endpoint, keys, 1.0)
            time.sleep(0.1)  # time for the handshake, or another attempt follows
            router.close()
        return worker.loop.num_taken == 0

    wait_until(is_free)


def test_a_long_step_costs_no_router_its_seat(worker, routers, monkeypatch):
    """Neither the one that waits for it, nor one whose heartbeats are not read meanwhile."""
    waiting, alive = routers()
    clock, draft, dropped = Clock(worker.loop._clock()), worker.runner.draft, []

    def draft_slowly(step):
        clock.now_s += 2 * shared_draft_loop.SEAT_TIMEOUT_S
        time.sleep(0.1)  # time for heartbeats
        return draft(step)

    monkeypatch.setattr(worker.loop, "_clock", clock)
    monkeypatch.setattr(worker.loop, "_drop", lambda seat, _: dropped.append(seat.index))
    monkeypatch.setattr(worker.runner, "draft", draft_slowly)
    waiting._group.begin(DraftStep(1, (), (), (), (), ()))

    def is_answered():
        alive.check()
        return has_answered(waiting._group)

    wait_until(is_answered)
    time.sleep(0.05)  # after the answer the worker looks for silent Routers
    assert dropped == []


def test_a_step_that_fails_ends_the_worker_for_all(tiny_model_dir, worker, routers):
    failing, other = routers()
    failing._start = other._start = lambda: (_ for _ in ()).throw(DraftFailedError("no worker"))
    delta = BlockTableDelta(0, 0, (LIMITS.num_blocks,))  # the first block of the other Router
    failing._group.begin(DraftStep(1, (), (), (delta,), (), ()))
    with pytest.raises(DraftFailedError, match="outside of the 120"):
        failing._group._receive()
    wait_until(lambda: worker.error is not None)
    engine = engine_of(tiny_model_dir, other)
    assert in_turns([engine], [requests(1)]) == [expected(tiny_model_dir, 1)]
    assert not other.is_available


def all_restarted(proposers):
    return all(each.num_restarts for each in proposers)


@pytest.mark.slow
def test_kill_9_of_the_worker_in_mid_enumeration(tiny_model_dir):
    """Both engines go on without drafts, with the same tokens, and draft again with a new one."""
    process = ProcessWorker(tiny_model_dir)
    proposers = [supervisor(tiny_model_dir, process.seat_ranks) for _ in range(2)]
    engines = [engine_of(tiny_model_dir, each, "outcomes") for each in proposers]
    try:
        tokens = in_turns(engines, [requests(0), requests(1)], num_steps=8)
        for engine, found in zip(engines, tokens, strict=True):
            for output in engine.step():
                found[output.request_id].extend(output.token_ids)
        process.process.kill()  # while it drafts after these steps
        for found, more in zip(tokens, in_turns(engines, [[], []]), strict=True):
            for name, token_ids in more.items():
                found[name].extend(token_ids)
        assert tokens == [expected(tiny_model_dir, index) for index in range(2)]
        wait_until(lambda: [each.check() for each in proposers] and all_restarted(proposers))
        assert process.num_started == 2, "one for both"
        again = in_turns(engines, [requests(2), requests(3)])
        assert again == [expected(tiny_model_dir, index) for index in (2, 3)]
        assert all(each.counts.ahead.num_used_tokens for each in proposers)
    finally:
        for each in proposers:
            each.close()
        process.stop()
