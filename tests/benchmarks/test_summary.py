"""Tests of medians, ratios and bars, computed by hand."""

import pytest

from benchmarks.rounds import Case, measure_rounds
from benchmarks.summary import (
    Comparison,
    at_least,
    at_most,
    compare,
    compare_all,
    compare_cases,
    num_other_outputs,
    summarize,
)
from benchmarks.workloads import Measurement, StreamRecord, Workload, all_at_once, one_by_one


def measurement(seconds, token_ids=(1, 2, 3, 4), first_s=0.5, length=1.0):
    return Measurement(seconds, (StreamRecord(token_ids, (first_s, first_s + 0.25)),), length)


def test_a_row_is_the_median_of_its_rounds():
    row = summarize("a", [measurement(1.0), measurement(4.0), measurement(2.0)])
    assert (row.tokens_per_s, row.slowest, row.fastest) == (2.0, 1.0, 4.0)
    assert row.first_token_ms == 500
    assert row.mean_acceptance_length == 1.0


def test_an_unknown_acceptance_length_is_none():
    assert summarize("a", [measurement(1.0, length=None)]).mean_acceptance_length is None


def test_ratios_are_computed_within_a_round():
    # The second round is ten times slower for both, which a ratio of medians would mix up.
    measured = {
        "fast": [measurement(1.0), measurement(10.0), measurement(1.0)],
        "slow": [measurement(2.0), measurement(20.0), measurement(4.0)],
    }
    ratio = compare(compare_cases("fast / slow", "fast", "slow", 2.0), measured)
    assert (ratio.smallest, ratio.median, ratio.largest) == (2.0, 2.0, 4.0)
    assert ratio.is_met
    assert not compare(compare_cases("slow / fast", "slow", "fast", 1.0), measured).is_met


def test_several_cases_on_a_side_count_by_their_total_time():
    measured = {"a": [measurement(1.0)], "b": [measurement(3.0)], "c": [measurement(1.0)]}
    ratio = compare(Comparison("", ("a", "b"), ("c",)), measured)
    assert ratio.median == pytest.approx((8 / 4) / (4 / 1))


def test_a_comparison_with_an_unmeasured_case_is_omitted():
    measured = {"a": [measurement(1.0)]}
    assert compare_all([compare_cases("", "a", "b")], measured) == ()


def test_differing_outputs_are_counted():
    measured = {
        "a": [measurement(1.0, (1, 2)), measurement(1.0, (1, 2))],
        "b": [measurement(1.0, (1, 2)), measurement(1.0, (1, 3))],
    }
    assert num_other_outputs(measured, "b", "a") == 1


def test_bars_hold_at_their_limit():
    assert at_least("", 2.0, 2.0).is_met
    assert not at_least("", 1.9, 2.0).is_met
    assert at_most("", 2.0, 2.0).is_met
    assert not at_most("", 2.1, 2.0).is_met


def test_gaps_are_between_messages():
    assert StreamRecord((1, 2, 3), (1.0, 1.5, 3.0)).gaps_s == (0.5, 1.5)
    assert StreamRecord((1,), (1.0,)).gaps_s == ()


def test_workloads():
    assert [each.prompts for each in one_by_one([(1,), (2,)], 4)] == [((1,),), ((2,),)]
    [many] = all_at_once([(1,), (2,)], 3, 4)
    assert many.prompts == ((1,), (2,), (1,))
    assert many.num_open == 3
    assert Workload(many.prompts, 4, num_streams=2).num_open == 2
    assert Workload(many.prompts, 4, num_streams=9).num_open == 3


class Recorder:
    """A contender that records its calls in a list that it shares with others."""

    def __init__(self, name, calls):
        self._name, self._calls = name, calls

    def measure(self, workload):
        self._calls.append((self._name, workload.prompts[0][0]))
        return measurement(1.0)


def test_cases_alternate_and_every_round_begins_with_another():
    calls = []
    contenders = {name: Recorder(name, calls) for name in ("a", "b")}
    cases = [Case(name, name, one_by_one([(10,), (20,)], 4)) for name in ("a", "b")]
    measured = measure_rounds(contenders, cases, num_rounds=3, quiet_limit_s=0)
    assert calls == [("a", 10), ("b", 10), ("b", 20), ("a", 20), ("a", 10), ("b", 10)]
    assert {name: len(each) for name, each in measured.items()} == {"a": 3, "b": 3}
