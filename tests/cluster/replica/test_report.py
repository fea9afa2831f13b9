"""Load and decisions that a replica reports."""

from datetime import UTC, datetime, timedelta

import pytest

from cluster.replica.report import ReplicaLoad, decision_news
from specdec.client import Counts
from specdec.types.drafts.draft_decision import Decision, DecisionChange, DecisionReason, chain
from specdec.types.reports.stats import EngineStats
from tests.clock import Clock


def load_at(rate, num_open, capacity):
    clock = Clock()
    load, reported = ReplicaLoad(32, clock), 0.0
    for second in range(30):
        reported = load.requests(num_open, rate * second, capacity)
        clock.now_s += 1
    return reported


@pytest.mark.parametrize(
    ("rate", "num_open", "capacity", "expected"),
    [
        (500, 4, 1000.0, 16),
        (500, 20, 1000.0, 20),
        (500, 4, None, 4),
        (0, 4, 1000.0, 4),
        (1000, 90, 1000.0, 90),
    ],
)
def test_open_requests_or_the_share_of_its_capacity(rate, num_open, capacity, expected):
    assert load_at(rate, num_open, capacity) == pytest.approx(expected)


def test_the_rate_is_that_of_the_last_ten_seconds():
    clock = Clock()
    load = ReplicaLoad(32, clock)
    assert load.requests(0, 0, 100.0) == 0, "one sample has no rate"
    clock.now_s += 1
    load.requests(0, 100, 100.0)
    for _ in range(12):
        clock.now_s += 1
        reported = load.requests(0, 100, 100.0)
    assert reported == 0


NOW = datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)


def stats(**changes):
    return EngineStats(0, 0, is_speculation_on=True, **changes)


def test_decisions_are_reported_by_the_wall_clock():
    decided = stats(
        decision=Decision(chain(2), DecisionReason.GOODPUT),
        counts=Counts(decisions={"goodput": 1}),
        decision_changes=(DecisionChange(90.0, 2, DecisionReason.GOODPUT, 5),),
    )
    assert (decided.num_chosen_tokens, decided.chosen.reason) == (2, DecisionReason.GOODPUT)
    [change] = decision_news(decided, 100.0, NOW)
    assert change.at == (NOW - timedelta(seconds=10)).replace(microsecond=600_000)
    assert (change.num_draft_tokens, change.reason, change.num_decoding) == (2, "goodput", 5)


def test_before_the_first_step_there_are_no_decisions():
    before = stats(decision=Decision(chain(3), DecisionReason.THRESHOLD))
    assert (before.num_chosen_tokens, before.chosen) == (0, None)
    assert decision_news(before, 100.0, NOW) == ()
