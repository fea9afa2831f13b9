"""The part of the GPU check that drafts in another process, on the CPU in small shapes."""

import pytest
import torch

from benchmarks.gpu import async_drafting
from benchmarks.gpu.async_drafting import Timeline, compare_async_drafting
from benchmarks.gpu.page import page
from benchmarks.gpu.parts import Context, PartReport


def test_the_overlap_is_the_part_of_the_draft_models_time_in_which_the_target_runs():
    timeline = Timeline([(0.0, 2.0), (3.0, 4.0)], [(1.0, 2.5), (3.5, 4.0)])
    assert timeline.overlap == pytest.approx(1.5 / 2.0)
    assert Timeline([(0.0, 1.0)], []).overlap == 0.0


def test_a_trace_has_the_first_spans_in_order():
    events = Timeline([(5.0, 7.0), (8.0, 9.0)], [(5.5, 6.0)]).events(2)
    assert [(each["name"], each["ts"], each["dur"]) for each in events] == [
        ("target", 0, 2_000_000),
        ("draft model", 500_000, 500_000),
    ]


@pytest.mark.slow
def test_drafts_of_another_process_are_made_while_the_target_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(async_drafting, "_MAX_TOKENS", 24)
    found = compare_async_drafting(Context(torch.device("cpu"), tmp_path, is_small=True))
    assert found["passed"]
    [modes] = found["placements"].values()
    assert modes["outcomes"]["hit_rate"] > 0
    assert modes["outcomes"]["overlap"] > 0
    report = PartReport(None, {"device": "cpu", "torch": "2"})
    report.add("asynchronous drafting", found | {"seconds": 1.0})
    assert "| draft model on cpu | outcomes |" in page(report)
