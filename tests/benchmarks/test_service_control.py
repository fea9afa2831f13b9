"""Tests of the statistics of benchmarks.service_control."""

import pytest

from benchmarks.service_control import AUTO, OFF, changes, make_cases, results
from benchmarks.workloads import Measurement, StreamRecord

NAMES = [AUTO, OFF, "1", "3"]


def rate(tokens_per_s):
    return Measurement(100 / tokens_per_s, (StreamRecord((1,) * 100, (0.1,)),))


def test_the_best_is_chosen_on_odd_rounds_and_compared_on_even_ones():
    own = {
        AUTO: [1, 90, 1, 92],
        OFF: [1, 80, 1, 80],
        "1": [60, 70, 60, 70],
        "3": [50, 200, 50, 200],
    }
    measured = {
        f"{name} {count}": list(map(rate, own[name]))
        for name in NAMES
        for count in (1, 2, 4, 8, 16, 32, 64)
    }
    first = results(measured, NAMES)[0]
    assert first.best == "1"
    assert first.best_share == pytest.approx(91 / 80)  # off is better than the best fixed number
    assert first.off_share == pytest.approx(91 / 80)
    assert first.tokens_per_s["3"] == pytest.approx(200)


def test_each_contender_starts_from_the_configured_state():
    found = changes((1, 3))
    assert list(found) == NAMES
    assert all(change.reset for change in found.values())
    assert found["3"].num_speculative_tokens == 3
    assert found[OFF].mode == "off"


def test_few_streams_send_as_many_requests_as_eight():
    cases = make_cases([(1,), (2,), (3,)], 16, NAMES)
    sizes = {case.workloads[0].num_streams: len(case.workloads[0].prompts) for case in cases}
    assert sizes == {1: 8, 2: 8, 4: 8, 8: 8, 16: 16, 32: 32, 64: 64}
