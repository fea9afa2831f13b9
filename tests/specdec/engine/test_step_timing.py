"""Times of drafting and verification, by a clock that the parts wind."""

from types import SimpleNamespace

import pytest

from specdec.engine.request_metrics import TimedProposer, TimedTarget
from specdec.speculation.proposers import DraftRequest
from specdec.types.errors import TargetFailedError
from tests.clock import Clock


class Slow:
    """Takes a second to begin and two to be collected."""

    def __init__(self, clock, error=None):
        self.clock = clock
        self.error = error
        self.begun = []
        self.released = []

    def begin(self, what):
        self.begun.append(what)
        self.clock.now_s += 1

    def collect(self):
        self.clock.now_s += 2
        if self.error is not None:
            raise self.error
        return ["collected"]

    def release(self, seq_id):
        self.released.append(seq_id)


def observed_of(timed, what):
    """What one step is observed to take, with ten seconds between its two calls."""
    clock, observed = Clock(), []
    slow = Slow(clock)
    part = timed(slow, observed.append, clock)
    part.begin(what)
    clock.now_s += 10
    assert part.collect() == ["collected"]
    assert slow.begun == [what]
    return observed


def test_from_begin_to_the_end_of_collect():
    assert observed_of(TimedTarget, SimpleNamespace()) == [13.0]
    assert observed_of(TimedProposer, [DraftRequest(None, 0), DraftRequest(None, 2)]) == [13.0]


def test_a_step_that_asks_for_no_draft_is_not_observed():
    assert observed_of(TimedProposer, [DraftRequest(None, 0)]) == []


def test_a_step_that_is_lost_is_not_observed():
    clock, observed = Clock(), []
    target = TimedTarget(Slow(clock, TargetFailedError("lost")), observed.append, clock)
    target.begin(SimpleNamespace())
    with pytest.raises(TargetFailedError):
        target.collect()
    assert observed == []


def test_a_proposer_hears_of_sequences_that_end():
    slow = Slow(Clock())
    TimedProposer(slow, print, Clock()).release(7)
    assert slow.released == [7]


def test_a_step_that_was_begun_while_another_ran_is_timed_from_the_end_of_that():
    clock, observed = Clock(), []
    target = TimedTarget(Slow(clock), observed.append, clock)
    target.begin("a")
    target.begin("b")
    clock.now_s += 10
    target.collect()  # begun 12 seconds ago
    clock.now_s += 5
    target.collect()
    assert observed == [14, 7]
