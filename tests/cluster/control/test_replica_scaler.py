"""Replicas over time: additions at once, removals after the hold, by hand."""

import pytest

from cluster.config.objective import Objective
from cluster.control.replica_scaler import (
    HOLD_S,
    LEAST_S,
    LENGTHS_S,
    MOST_REPLICAS,
    WINDOW_S,
    ReplicaScaler,
    Totals,
)
from specdec.types.reports.service_curve import ServiceCurve
from specdec.types.reports.stats import Counts

CURVE = ServiceCurve((1, 4, 16), (100.0, 100.0, 25.0), 1000.0)
"""With 100 tokens of prompt and output: 2.86 requests a second, 11.4 at a time."""

STEP_S = 5


class Pool:
    """A pool with a scaler. Its first replica serves everything."""

    def __init__(self, num_replicas=1):
        self.now_s, self.totals, self.num_replicas = (
            1000.0,
            Totals(1e6, 1e9, 1e9, 1e6),
            num_replicas,
        )
        self.scaler = ReplicaScaler(Objective(2.0, 0.04), self.now_s)

    def needed(self, *, num_open=0, curves=(CURVE,), **options):
        others = dict.fromkeys(range(1, self.num_replicas), Totals())
        totals = {0: self.totals, **others}
        return self.scaler.needed(self.now_s, totals, num_open, curves, **options)

    def serve(self, requests_per_s, seconds, **options):
        """Serve for a time; return the numbers of replicas."""
        found = []
        for _ in range(round(seconds / STEP_S)):
            count = requests_per_s * STEP_S
            self.totals = self.totals.plus(Totals(count, 100 * count, 100 * count, count))
            self.now_s += STEP_S
            found.append(self.needed(**options))
        return found


def test_additions_are_immediate_and_removals_held():
    pool = Pool()
    assert pool.serve(2, 300)[-1] == 1
    more = pool.serve(20, WINDOW_S)
    assert more[1] > 1, "ten seconds later"
    assert more[-1] == 8  # 20 / 2.86 + its deviation
    fewer = pool.serve(2, WINDOW_S + HOLD_S + STEP_S)
    assert set(fewer[: round(HOLD_S / STEP_S)]) == {8}
    assert fewer[-1] == 2, "the peak of the hold, and a spare half"


def test_noise_around_a_limit_does_not_remove_a_replica():
    pool = Pool()
    pool.serve(20, 120)
    assert set(pool.serve(19, 3 * HOLD_S)) == {8}
    assert pool.serve(15, 2 * HOLD_S)[-1] == 7


def test_a_restart_removes_no_replica_for_a_hold():
    pool = Pool(num_replicas=9)
    assert set(pool.serve(2, LEAST_S)) == {None}, "others may not have reported yet"
    assert set(pool.serve(2, HOLD_S, num_starting=2)) == {11}, "two start"
    assert pool.serve(2, STEP_S) == [2]


def test_replicas_of_a_rollout_are_kept_from_the_first_number_on():
    pool = Pool(num_replicas=8)
    first = pool.serve(2, LEAST_S + STEP_S)[-1]
    pool.num_replicas = 10  # surge
    assert set(pool.serve(2, HOLD_S / 2)) == {first}


def test_a_restart_under_load_knows_the_open_requests_and_the_rate():
    pool = Pool(num_replicas=6)
    found = [pool.needed(num_open=60), *pool.serve(20, 120, num_open=60)]
    assert found[:6] == [None] * 6
    assert set(found[6:]) == {8}


def test_without_curves_the_number_stays_until_it_is_unknown():
    pool = Pool()
    assert set(pool.serve(20, 60, curves=())) == {None}
    many = pool.serve(20, 60)[-1]
    assert set(pool.serve(20, HOLD_S, curves=())) == {many}
    assert set(pool.serve(20, 60, curves=())) == {None}
    assert pool.serve(20, LEAST_S)[-1] is None
    assert pool.serve(20, STEP_S) == [8]


def test_stale_reports_lower_nothing_and_have_no_rate_when_they_end():
    pool = Pool()
    pool.serve(20, 120)
    assert set(pool.serve(0, HOLD_S - STEP_S, is_stale=True)) == {8}
    count = 20 * (HOLD_S - STEP_S)
    pool.totals = pool.totals.plus(Totals(count, 100 * count, 100 * count, count))
    assert set(pool.serve(20, HOLD_S)) == {8}, "the requests of all that time"
    assert pool.serve(100, 60, is_stale=True)[-1] > 8
    assert set(pool.serve(0, HOLD_S, is_stale=True)[-2:]) == {None}


def test_stale_reports_do_not_end_a_hold():
    pool = Pool()
    pool.serve(20, 120)
    pool.serve(2, HOLD_S)
    assert set(pool.serve(2, 2 * WINDOW_S, is_stale=True)) == {8}
    assert pool.serve(2, STEP_S) == [2]


def test_open_requests_of_replicas_that_leave_are_ended():
    pool = Pool()
    others = Totals(500, 5e4, 2.5e4, 400)

    def needed(*left, num_open):
        pool.now_s += STEP_S
        return pool.scaler.needed(pool.now_s, {0: pool.totals, **dict(left)}, num_open, [CURVE])

    needed((1, Totals()), num_open=0)
    pool.totals = pool.totals.plus(Totals(500, 5e4, 4.5e4, 400))
    needed((1, others), num_open=200)
    needed(num_open=100)
    lengths = pool.scaler._samples[-1].since(pool.scaler._samples[0]).lengths
    assert lengths.prompt_tokens == pytest.approx(100), "1,000 prompts"
    assert lengths.output_tokens == pytest.approx(7e4 / 950), "50 have half of theirs"


def test_a_replica_that_returns_has_counted_meanwhile():
    pool = Pool()
    pool.serve(2, 120)
    pool.scaler.needed(pool.now_s + STEP_S, {}, 0, [CURVE])
    pool.totals = pool.totals.plus(Totals(1200, 120_000, 120_000, 1200))
    pool.now_s += 60
    assert pool.needed() == 6, "14 a second"


def test_open_requests_count_though_nothing_arrives():
    pool = Pool()
    pool.serve(2, 60)
    pool.totals = pool.totals.plus(Totals(0, 4e4, 2e4, 0))
    assert pool.serve(0, 5, num_open=400) == [4], "it is full, and 389 / 2.86 / CLEAR_S"


@pytest.mark.parametrize("num_missing", [0, 1])
def test_a_new_backlog_adds_replicas_to_a_pool_that_never_has_all(num_missing):
    """As within the tolerance of KEDA, or with a pod that never schedules."""
    pool = Pool(num_replicas=30)
    pool.num_replicas = pool.serve(72, 1200)[-1] - num_missing
    before = pool.serve(72, 1200)[-1]
    assert before >= 25
    assert before - pool.num_replicas == num_missing
    assert pool.serve(72, 30, num_open=11.4 * before + 400)[-1] >= before + 2


def test_a_backlog_after_an_outage_is_a_new_one():
    pool = Pool(num_replicas=30)
    pool.num_replicas = before = pool.serve(72, 1200)[-1]
    pool.now_s += 1200
    assert pool.serve(72, 60, num_open=11.4 * before + 400)[-1] >= before + 2


def test_rejected_requests_count_and_do_not_shorten_the_others():
    pool = Pool()
    pool.serve(2, 60)
    pool.totals = pool.totals.plus(Totals(num_requests=18 * WINDOW_S))
    pool.now_s += WINDOW_S
    assert pool.needed() == 8, "18 a second"


@pytest.mark.parametrize(
    ("share", "output_tokens"), [(0.25, 100), (0.5, 100), (0.75, 50), (1.0, 0)]
)
def test_failed_requests_have_a_prompt_and_a_part_of_an_output(share, output_tokens):
    pool = Pool()
    pool.needed()
    tokens = 1e5 * (1 - share)
    pool.totals = pool.totals.plus(Totals(1000, 1e5, tokens, 1000, 1000 * share))
    pool.serve(0, STEP_S)
    lengths = pool.scaler._samples[-1].since(pool.scaler._samples[0]).lengths
    assert lengths == (100, pytest.approx(output_tokens))


def test_lengths_are_those_of_the_last_minutes():
    pool = Pool()
    pool.serve(2, 60)
    pool.totals = pool.totals.plus(Totals(1000, 1e6, 1e6, 1000))
    assert pool.serve(2, 60)[-1] > 10
    assert pool.serve(2, LENGTHS_S + HOLD_S)[-1] == 2


def test_a_replica_that_starts_again_counts_from_0():
    pool = Pool()
    pool.needed()
    pool.serve(20, 120)
    pool.totals = Totals()
    assert set(pool.serve(20, 3 * HOLD_S)) == {8}


@pytest.mark.parametrize("curve", [CURVE, ServiceCurve((1,), (1e-3,), 1e-3)])
def test_any_totals_have_a_number(curve):
    pool = Pool()
    pool.needed()
    pool.now_s, pool.totals = pool.now_s + LEAST_S, Totals(1e15, -1e15, 1e15, 0)
    assert pool.needed(num_open=2**20, curves=(curve,)) == MOST_REPLICAS


def test_counters_become_totals_of_choices():
    counts = Counts(
        num_requests=9,
        num_prompt_tokens=1000,
        num_cached_tokens=300,
        num_generated_tokens=500,
        ended={"stop": 2, "abort": 1, "error": 4},
    )
    assert Totals.of(counts) == Totals(9, 700, 500, 7, 4)
