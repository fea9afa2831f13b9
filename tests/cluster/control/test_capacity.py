"""Capacity of a replica within an objective, and replicas that a demand needs, by hand."""

import pytest

from cluster.config.objective import Objective
from cluster.control.capacity import CLEAR_S, Capacity, Lengths, capacity, replicas_needed
from specdec.types.reports.service_curve import ServiceCurve

# 10 ms a token up to four streams, then in proportion: a batch has at most 400 tokens a second.
CURVE = ServiceCurve((1, 4, 16), (100.0, 100.0, 25.0), 1000.0)
OBJECTIVE = Objective(2.0, 0.04)


def test_a_replica_holds_what_stays_within_the_limit_of_tokens():
    one = capacity(CURVE, Lengths(0, 100), Objective(2.0, 0.02))
    assert one.num_streams == pytest.approx(8, abs=0.02)
    assert one.requests_per_s == pytest.approx(4, rel=0.001)


def test_a_loose_limit_is_met_by_the_whole_batch():
    assert capacity(CURVE, Lengths(0, 100), Objective(2.0, 1.0)).num_streams == 16


def test_prompts_take_time_of_the_others():
    one = capacity(CURVE, Lengths(100, 100), OBJECTIVE)
    assert one.num_streams == pytest.approx(4 / (0.1 + 0.25), abs=0.02)
    assert one.requests_per_s == pytest.approx(1 / (0.1 + 0.25), rel=0.001)


def test_prompts_that_take_most_of_the_limit_leave_little_queue():
    assert capacity(CURVE, Lengths(1900, 1), OBJECTIVE).requests_per_s == pytest.approx(0.1 / 1.9)


def test_an_objective_that_no_replica_meets_has_a_bounded_demand():
    one = capacity(CURVE, Lengths(5000, 100), Objective(0.1, 0.001))
    assert one.num_streams == 1
    assert replicas_needed(1.0, 0, 1, one) == pytest.approx(50 + 50**0.5)


def test_arrivals_with_a_deviation_or_what_is_open():
    one = Capacity(4.0, 2.0)
    assert replicas_needed(8.0, 0, 9, one) == pytest.approx(4 + 1)
    assert replicas_needed(0.0, 40, 12, one) == 10
    assert replicas_needed(0.0, 0, 12, one) == 0


def test_what_exceeds_the_streams_is_cleared_beside_the_arrivals():
    one = Capacity(4.0, 2.0)
    assert replicas_needed(8.0, 12 + 2 * CLEAR_S * 3, 3, one) == pytest.approx(4 + 3)
    assert replicas_needed(0.0, 12 + 2 * CLEAR_S, 3, one) == pytest.approx(3 + 1)
