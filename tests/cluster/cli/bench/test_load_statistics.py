"""The statistics of a run, compared with values computed by hand."""

import numpy as np
import pytest

from cluster.cli.bench.backend import TokenUsage
from cluster.cli.bench.load import (
    RequestRecord,
    distribution,
    latency_ms,
    peak_concurrency,
    percentile,
    summarize,
)
from specdec.types.stats import SpeculationStats

# Sent at 1 s, first token after 0.5 s, then after 0.2 and 0.3 s; 5 tokens, so 4 in 0.5 s.
FIRST = RequestRecord(1.0, 1.0, (1.5, 1.7, 2.0), 2.0, TokenUsage(10, 5, SpeculationStats(2, 6, 3)))
# Due at 1 s and sent 0.5 s later; one token after 0.1 s.
SECOND = RequestRecord(1.0, 1.5, (1.6,), 1.6, TokenUsage(20, 1, SpeculationStats(1, 2, 0)))
FAILED = RequestRecord(None, 3.0, (3.1,), 5.0, None, "UNAVAILABLE")


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (FIRST, {"ttft": [500], "tpot": [125], "itl": [200, 300], "e2el": [1000]}),
        (SECOND, {"ttft": [100], "tpot": [], "itl": [], "e2el": [100]}),
        (
            RequestRecord(0.0, 0.0, (), 0.25, TokenUsage(5, 0)),
            {"ttft": [], "tpot": [], "itl": [], "e2el": [250]},
        ),
    ],
)
def test_latencies_of_one_request(record, expected):
    for name, values in expected.items():
        assert latency_ms(record, name) == pytest.approx(values), name


def test_a_run_by_hand():
    summary = summarize([FIRST, SECOND, FAILED], [99], {})
    assert (summary.completed, summary.failed, summary.errors) == (2, 1, {"UNAVAILABLE": 1})
    assert summary.duration_s == 4.0  # from 1 s, when the first was sent, to 5 s
    assert (summary.total_input_tokens, summary.total_output_tokens) == (30, 6)
    assert summary.request_throughput == 0.5
    assert summary.output_throughput == 1.5
    assert summary.total_token_throughput == 9.0
    assert summary.request_goodput is None
    assert summary.peak_concurrency == 2
    assert summary.max_lateness_s == 0.5
    assert summary.latencies_ms["ttft"].mean == pytest.approx(300)
    assert summary.latencies_ms["ttft"].std == pytest.approx(200)
    assert summary.latencies_ms["ttft"].percentiles == pytest.approx({99: 496})
    assert summary.latencies_ms["itl"].median == pytest.approx(250)
    assert summary.speculation == SpeculationStats(3, 8, 3)


@pytest.mark.parametrize(
    ("objectives", "good"),
    [
        ({"ttft": 500.0}, 2),
        ({"ttft": 499.0}, 1),
        ({"ttft": 500.0, "tpot": 124.0}, 1),
        ({"itl": 250.0}, 2),
        ({"itl": 249.0}, 1),
        ({"e2el": 99.0}, 0),
    ],
)
def test_goodput_counts_requests_that_meet_every_objective(objectives, good):
    summary = summarize([FIRST, SECOND, FAILED], [], objectives)
    assert summary.request_goodput == good / 4


def test_a_run_in_which_all_requests_failed():
    summary = summarize([FAILED], [50], {"ttft": 1.0})
    assert (summary.completed, summary.failed, summary.request_throughput) == (0, 1, 0)
    assert summary.request_goodput == 0
    assert summary.latencies_ms == {}
    assert summary.speculation is None


def test_percentiles_equal_those_of_numpy():
    values = sorted([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0])
    for percent in (0, 12.5, 50, 90, 99.9, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))
    assert percentile([7.0], 99) == 7.0
    assert distribution(values, []).std == pytest.approx(np.std(values))


def test_peak_concurrency():
    def record(sent, done):
        return RequestRecord(sent, sent, (), done, None, "x")

    assert peak_concurrency([record(0, 1), record(1, 2)]) == 1
    assert peak_concurrency([record(0, 3), record(1, 2), record(1.5, 4)]) == 3
