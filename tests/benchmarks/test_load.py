"""Latencies and cases of the load benchmark."""

import json

import pytest

from benchmarks import load
from benchmarks.workloads import Measurement, StreamRecord


def test_latencies_of_a_load():
    streams = (StreamRecord((1, 2), (0.1, 0.2)), StreamRecord((1,), (0.3,)))
    row = load.load_row("engine", 2, [Measurement(0.5, streams)])
    assert row.tokens_per_s == 6.0
    assert row.first_token.p50_ms == pytest.approx(200)
    assert row.gap.p95_ms == pytest.approx(100)
    assert load.latency([]).p99_ms == 0


def test_the_report_is_written_even_if_nothing_can_draw_the_charts(tmp_path, monkeypatch):
    def draw_charts(charts):
        raise ModuleNotFoundError

    monkeypatch.setattr(load, "draw_charts", draw_charts)
    monkeypatch.setattr(load, "measure", lambda options: ({}, {}))
    path = tmp_path / "report.json"
    with pytest.raises(ModuleNotFoundError):
        load.main(["--rounds", "2", "--output", str(path)])
    assert json.loads(path.read_text())["num_rounds"] == 2


def test_a_load_runs_more_requests_than_are_open():
    cases = load.make_cases(["engine"], [(1,), (2,), (3,)], [4], 8, "none")
    [workload] = cases["engine", 4].workloads
    assert (len(workload.prompts), workload.num_open) == (8, 4)
