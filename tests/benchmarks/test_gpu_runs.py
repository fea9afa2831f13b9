"""How a run of the GPU check goes on after parts and cases that fail, hang or crash."""

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu.page import page, summary
from benchmarks.gpu.parts import Context, Part, PartReport, PartSkippedError, run_cases, run_parts
from benchmarks.gpu.processes import ForkedPart


@pytest.fixture
def small(tmp_path):
    return Context(torch.device("cpu"), tmp_path, is_small=True)


def skipped(reason):
    def run(context):
        raise PartSkippedError(reason)

    return run


def test_a_run_continues_where_the_last_one_stopped(tmp_path, small):
    path, runs, now = tmp_path / "report.json", [], [0.0]

    def part(name, seconds):
        def run(context):
            runs.append(name)
            now[0] += seconds
            return {"passed": True}

        return Part(name, run)

    parts = [part("a", 30), part("b", 40), part("c", 1)]
    report = PartReport(path, {"device": "cpu"})
    run_parts(parts, small, report, 60, lambda: now[0])
    assert runs == ["a", "b"]
    assert "no time left of 1 minutes" in report.skipped["c"]
    again = PartReport(path, {"device": "cpu"})
    run_parts(parts, small, again, 60, lambda: now[0])
    assert runs == ["a", "b", "c"]
    assert again.skipped == {}
    assert json.loads(path.read_text())["parts"].keys() == {"a", "b", "c"}
    assert PartReport(path, {"device": "another"}).parts == {}


def test_a_part_is_not_begun_without_the_time_that_it_needs(small):
    report = PartReport(None, {"device": "cpu"})
    run_parts([Part("long", skipped("begun"), least_s=90.0)], small, report, 60, lambda: 0.0)
    assert report.skipped == {"long": "needs 90 s of a run, which has 60 left"}


def test_a_failed_part_does_not_end_the_run(small, tmp_path):
    def broken(context):
        raise ValueError("it broke\nin two lines")

    report = PartReport(None, {"device": "cpu", "torch": "2"})
    parts = [
        Part("broken", broken),
        Part("gpu", skipped("never"), needs_gpu=True),
        Part("skips", skipped("no package")),
        Part("works", lambda _: {"aims": {"speed": {"value": 2.0, "at_least": 3.0}}}),
    ]
    run_parts(parts, small, report, 60)
    assert report.parts["broken"]["error"] == "ValueError: it broke\nin two lines"
    assert report.skipped == {"gpu": "needs a GPU", "skips": "no package"}
    assert not report.passed
    text = page(report)
    assert "| broken | failed ValueError: it broke |" in text
    assert "| gpu | skipped: needs a GPU |" in text
    assert "| speed | works | 2 | at least 3 | missed |" in text


def test_the_stored_page_is_that_of_the_stored_report():
    path = Path(__file__).parents[2] / "docs" / "benchmarks" / "gpu-check.json"
    stored = json.loads(path.read_text())
    report = PartReport(path, stored["head"])
    report.skipped = stored["skipped"]
    assert path.with_suffix(".md").read_text() == page(report)


def test_the_command_reports_skipped_parts(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    output = tmp_path / "gpu-check.json"
    arguments = ["--only", "memory plans", "grid", "--output", str(output)]
    assert gpu_check.main(arguments) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("passed memory plans (")
    assert printed[-1] == "skipped grid: needs a GPU"
    assert json.loads(output.read_text())["skipped"] == {"grid": "needs a GPU"}
    assert "Passed: memory plans.\n" in output.with_suffix(".md").read_text()


def test_a_part_that_hangs_is_stopped_with_what_it_found(small):
    def hang(context):
        os.write(1, b"it waits\n")
        context.save({"passed": True, "found": 3, "error": "did not end"})
        time.sleep(60)

    result = end_of(ForkedPart(Part("hangs", hang), small, 3.0))
    assert result["error"] == "stopped after 3 s; did not end"
    assert (result["passed"], result["found"]) == (False, 3)
    assert result["log"] == ["it waits"]
    assert any("in hang" in line for line in result["stack"][:3])


def test_a_part_that_crashes_leaves_the_others(small):
    def crash(context):
        os.kill(os.getpid(), signal.SIGSEGV)

    report = PartReport(None, {"device": "cpu", "torch": "2"})
    parts = [
        Part("crashes", crash, is_timed=False),
        Part("works", lambda _: {"found": 1}, is_timed=False),
        Part("raises", skipped("no package")),
    ]
    run_parts(parts, small, report, 60, start=ForkedPart)
    assert report.parts["crashes"]["error"] == "the process ended with exit code -11; no result"
    assert report.parts["works"]["found"] == 1
    assert report.skipped == {"raises": "no package"}
    lines = summary(report)
    assert any(line.startswith("FAILED crashes") for line in lines)


def end_of(part):
    while (result := part.poll()) is None:
        time.sleep(0.01)
    return result


def test_cases_continue_after_a_failed_one(small):
    saved = []

    def broken():
        raise ValueError("it broke")

    def poisoned():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    context = replace(small, save=saved.append)
    cases = [("a", broken), ("b", lambda: {"passed": True}), ("c", poisoned), ("d", broken)]
    found = run_cases(cases, context)
    assert not found["passed"]
    assert list(found["cases"]) == ["a", "b", "c"]
    assert found["error"].startswith("c: CUDA error")
    assert saved[1]["error"] == "did not end; ran case b"
