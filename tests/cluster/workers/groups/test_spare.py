"""Spare ranks, with groups and ranks that live and fail on command."""

import threading

import pytest

from cluster.workers.groups.ranks import RankLoss
from cluster.workers.groups.spare import SpareRanks
from cluster.workers.groups.supervisors import DraftSupervisor
from specdec.config.engine import DraftLimits
from specdec.speculation.proposers import DraftVocabulary
from specdec.types.errors import DraftFailedError
from tests.clock import Clock
from tests.waiting import wait_until

LIMITS = DraftLimits(num_blocks=20, block_size=4, max_model_len=80, max_catch_up_tokens=16)


class Ranks:
    """Ranks that live until `ended` is set. replaces: the ranks that these are spares of."""

    def __init__(self, replaces=None):
        self.replaces = replaces
        self.are_prepared = True
        self.ended = None
        self.is_killed = False

    def poll_prepared(self):
        return self.are_prepared

    def loss(self):
        return self.ended

    def kill(self):
        self.is_killed = True


class Group:
    """Group that can only be lost and ended."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.is_closed = False

    def check_alive(self):
        if self.ranks.ended is not None:
            raise DraftFailedError("rank 0 ended")

    def keep_seats(self):
        """Its ranks have none."""

    def poll_late(self):
        """No step of it is late."""

    def kill(self):
        self.ranks.kill()

    def close(self):
        self.is_closed = True


class Starts:
    """The groups and spares that were started. `may_start` holds back the start of spares."""

    def __init__(self):
        self.groups, self.spares = [], []
        self.group_error = self.spare_error = None
        self.may_start = threading.Event()
        self.may_start.set()

    def start_group(self, spare):
        if self.group_error is not None and spare is not None:
            spare.kill()
            raise self.group_error
        self.groups.append(Group(spare or Ranks()))
        return self.groups[-1]

    def start_spare(self, lost):
        self.may_start.wait(10)
        if self.spare_error is not None:
            raise self.spare_error
        self.spares.append(Ranks(replaces=lost))
        return self.spares[-1]


@pytest.fixture
def starts():
    return Starts()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def spare(starts, clock):
    spare = SpareRanks(starts.start_group, starts.start_spare, clock)
    yield spare
    starts.may_start.set()
    spare.close()


def maintain(spare, group):
    """Have spares started, and wait for the end of the start."""
    spare.maintain(group)
    wait_until(lambda: spare._starting is None)


def test_spares_replace_lost_ranks_and_others_are_started_for_the_new_ones(spare, starts):
    first = spare.start()
    assert starts.spares == [], "the first group is started without one"
    maintain(spare, first)
    maintain(spare, first)
    assert len(starts.spares) == 1
    second = spare.start()
    assert second.ranks is starts.spares[0]
    assert second.ranks.replaces is first.ranks
    maintain(spare, second)
    assert starts.spares[1].replaces is second.ranks
    assert not starts.spares[1].is_killed


def test_without_prepared_spares_new_ranks_are_started(spare, starts):
    group = spare.start()
    for fault in ({"are_prepared": False}, {"ended": RankLoss(0, "ended")}):
        maintain(spare, group)
        for name, value in fault.items():
            setattr(starts.spares[-1], name, value)
        group = spare.start()
        assert group.ranks.replaces is None, fault
        assert starts.spares[-1].is_killed


def test_spares_that_fail_to_replace_lost_ranks_do_not_count_as_a_failed_start(spare, starts):
    maintain(spare, spare.start())
    starts.group_error = DraftFailedError("the process did not end")
    group = spare.start()
    assert group.ranks.replaces is None
    assert starts.spares[0].is_killed


def test_spares_of_a_group_that_is_lost_meanwhile_are_ended(spare, starts):
    """They would take over the GPUs and the node of ranks that do not exist any more."""
    first = spare.start()
    starts.may_start.clear()
    spare.maintain(first)
    second = spare.start()
    assert second.ranks.replaces is None, "it does not wait"
    spare.maintain(second)
    starts.may_start.set()
    wait_until(lambda: starts.spares and starts.spares[0].is_killed)
    wait_until(lambda: spare._starting is None)
    maintain(spare, second)
    assert spare.start().ranks.replaces is second.ranks


def test_spares_that_died_are_replaced_with_increasing_delays(spare, starts, clock):
    group = spare.start()
    maintain(spare, group)
    starts.spares[0].ended = RankLoss(0, "ended")
    maintain(spare, group)
    assert len(starts.spares) == 2, "at once after the first failure"
    starts.spares[1].ended = RankLoss(0, "ended")
    maintain(spare, group)
    assert len(starts.spares) == 2
    clock.now_s += 1
    maintain(spare, group)
    assert len(starts.spares) == 3


def test_spares_that_do_not_start_are_tried_again_later(spare, starts, clock):
    group = spare.start()
    starts.spare_error = TimeoutError("was not placed within 60 s")
    for _ in range(3):
        maintain(spare, group)
    starts.spare_error = None
    maintain(spare, group)
    assert starts.spares == []
    clock.now_s += 1
    maintain(spare, group)
    assert len(starts.spares) == 1


def test_closing_ends_spares_also_those_that_are_being_started(spare, starts):
    group = spare.start()
    maintain(spare, group)
    spare.close()
    assert starts.spares[0].is_killed
    maintain(spare, group)
    assert len(starts.spares) == 1


def test_spares_whose_start_ends_after_the_close_are_ended(spare, starts):
    group = spare.start()
    starts.may_start.clear()
    spare.maintain(group)
    spare.close()
    starts.may_start.set()
    wait_until(lambda: starts.spares and starts.spares[0].is_killed)


def test_a_supervisor_keeps_spares_while_it_has_a_group(spare, starts):
    supervisor = DraftSupervisor(spare.start, LIMITS, DraftVocabulary(), spare)
    supervisor.check()
    wait_until(lambda: len(starts.spares) == 1 and spare._starting is None)
    starts.groups[0].ranks.ended = RankLoss(0, "ended")
    supervisor.check()
    wait_until(lambda: supervisor.is_available)
    assert starts.groups[1].ranks is starts.spares[0]
    assert supervisor.num_restarts == 1
    supervisor.check()
    wait_until(lambda: len(starts.spares) == 2 and spare._starting is None)
    supervisor.close()
    assert starts.groups[1].is_closed
    assert starts.spares[1].is_killed
