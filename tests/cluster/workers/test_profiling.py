# Modules: cluster.workers.messages.profile_messages, specdec.types.reports.profile
"""Profiles of a replica: messages, limits, concurrency and errors."""

import asyncio
import itertools
import time
from dataclasses import replace

import pytest

from cluster.workers import profiling
from cluster.workers.messages.profile_messages import (
    END,
    ProfileInbox,
    WorkerProfileOrder,
    is_for_profiles,
    is_report,
    order_in,
)
from cluster.workers.messages.serialization import (
    CAUGHT_UP,
    STOP,
    encode_error,
    encode_output,
    encode_step,
)
from cluster.workers.profiling import Profiling
from specdec.types.errors import InvalidValueError, NotReadyError, OverloadedError
from specdec.types.messages import StepInput, VerifyOutput
from specdec.types.reports.profile import OperationTime, ProfileOrder, WorkerProfile
from tests.clock import Clock
from tests.waiting import DEADLINE_S, eventually

ORDER = ProfileOrder(num_steps=4, timeout_s=0.3)


class FakeModel:
    """Model that reports when a test sets `reports`, or at `end_profile`."""

    def __init__(self, num_ranks=1):
        self.num_ranks = num_ranks
        self.orders = []
        self.num_ends = 0
        self.reports = None
        self.ends_on_request = True

    def begin_profile(self, order):
        self.orders.append(order)

    def end_profile(self):
        self.num_ends += 1
        if self.ends_on_request and self.reports is None:
            self.reports = self.profiles(2)

    def collect_profile(self):
        return self.reports

    def profiles(self, num_steps):
        worker = self.orders[-1].worker
        return tuple(WorkerProfile(worker, rank, num_steps) for rank in range(self.num_ranks))


@pytest.fixture
def target():
    return FakeModel(num_ranks=2)


@pytest.fixture
def draft():
    return FakeModel()


@pytest.fixture
def take(tmp_path, target, draft, monkeypatch):
    monkeypatch.setattr(profiling, "_POLL_S", 0.01)
    taker = Profiling(tmp_path, 3, "r1")

    async def call(function):
        return function()

    def take(order=ORDER, clock=time.monotonic):
        taker._clock = clock
        taken = taker.take(order, {"target": target, "draft model": draft}, call)
        return asyncio.wait_for(taken, DEADLINE_S)

    return take


async def test_it_ends_after_the_steps_of_the_target(take, target, draft, tmp_path):
    clock = Clock()
    taken = asyncio.create_task(take(clock=clock))
    await eventually(lambda: target.orders and draft.orders)
    clock.now_s += 0.25
    target.reports = target.profiles(4)
    report = await taken
    assert report.replica_id == "r1"
    assert report.elapsed_s == 0.25
    assert [(each.worker, each.rank, each.num_steps) for each in report.workers] == [
        ("target", 0, 4),
        ("target", 1, 4),
        ("draft model", 0, 2),
    ]
    [of_target], [of_draft] = target.orders, draft.orders
    assert (of_target.num_steps, of_target.max_bytes) == (4, 2**20)
    assert of_target.directory == of_draft.directory
    assert of_target.directory.startswith(f"{tmp_path}/20")


async def test_it_ends_with_fewer_steps_at_the_timeout(take, target):
    report = await take()
    assert [each.num_steps for each in report.workers] == [2, 2, 2]
    assert report.elapsed_s >= 0.3
    assert target.num_ends == 1


async def test_a_draft_model_that_restarts_is_left_out(take, target, draft):
    draft.num_ranks = 0
    target.reports = ()
    with pytest.raises(NotReadyError, match="the models were lost while they were profiled"):
        await take()
    assert draft.orders == []
    assert target.orders[0].max_bytes == 3 * 2**20 // 2


async def test_only_one_runs_and_it_continues_if_its_caller_is_cancelled(take, target):
    clock = Clock()
    first = asyncio.create_task(take(clock=clock))
    await eventually(lambda: target.orders)
    with pytest.raises(OverloadedError, match="a profile is being taken"):
        await take(clock=clock)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    with pytest.raises(OverloadedError):
        await take(clock=clock)
    clock.now_s += ORDER.timeout_s
    async with asyncio.timeout(DEADLINE_S):
        while (report := await report_if_free(take, clock)) is None:
            await asyncio.sleep(0.01)
    assert target.num_ends == 1
    assert len(report.workers) == 3


async def report_if_free(take, clock):
    """Return the report, or None while another profile is being taken."""
    try:
        return await take(clock=clock)
    except OverloadedError:
        return None


async def test_ranks_that_never_report_time_out(take, target, monkeypatch):
    monkeypatch.setattr(profiling, "WRITING_S", 5.0)
    target.ends_on_request = False
    with pytest.raises(NotReadyError, match="the models did not report their profiles"):
        await take(replace(ORDER, timeout_s=1.0), itertools.count().__next__)
    assert target.num_ends == 2, "at the timeout, and when it was cancelled"


async def test_a_failure_ends_it_on_the_other_ranks(take, target, draft):
    def fail():
        raise KeyError("a bug of ours")

    target.collect_profile = fail
    with pytest.raises(KeyError):
        await take()
    assert (target.num_ends, draft.num_ends) == (1, 1)


async def test_none_is_taken_while_the_target_restarts(take, target, draft):
    target.num_ranks = 0
    with pytest.raises(NotReadyError, match="the model is starting again"):
        await take()
    assert (target.orders, draft.orders) == ([], [])
    target.num_ranks = 2
    assert len((await take()).workers) == 3


async def test_without_a_directory_none_is_taken(target):
    with pytest.raises(InvalidValueError, match="profile_dir is None; it must be a directory"):
        await Profiling(None, 1, "r1").take(ORDER, {"target": target}, None)


SENT = WorkerProfileOrder("draft model", 3, "/traces/now", 2**20)


def profile(rank):
    return WorkerProfile("target", rank, 3, "/x", 5, (OperationTime("a", 1, 0.5, 1.5, 0.0),))


def test_messages_of_steps_are_distinguished_from_those_of_profiles():
    step, output = StepInput(-1, (), (), (), ()), VerifyOutput(-1, ())
    for frames in (STOP, CAUGHT_UP, encode_step(step), encode_output(output), encode_error("no")):
        assert not is_for_profiles(frames)
        assert not is_report(frames)
    assert is_for_profiles(END)
    assert is_for_profiles(SENT.encode())
    assert is_report(SENT.report(profile(0)))


def test_orders_arrive_as_they_were_sent():
    assert order_in(SENT.encode()) == SENT
    assert order_in(END) is None


def test_all_reports_are_awaited_and_those_of_earlier_orders_are_dropped():
    inbox = ProfileInbox(SENT, 2)
    inbox.take(WorkerProfileOrder("target", 3, "/traces/before", 1).report(profile(0)))
    for rank in (1, 0):
        assert inbox.reports is None
        inbox.take(SENT.report(profile(rank)))
    assert inbox.reports == (profile(0), profile(1))
