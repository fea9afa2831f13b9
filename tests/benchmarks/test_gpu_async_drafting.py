"""The part of the GPU check that drafts in another process, on the CPU in small shapes."""

import ast
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import async_drafting
from benchmarks.gpu.async_drafting import Timeline, compare_async_drafting
from benchmarks.gpu.page import page
from benchmarks.gpu.parts import Context, PartReport

ROOT = Path(__file__).parents[2]


def imported(path):
    """Return the modules that a file imports when it is imported itself."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def file_of(module):
    path = ROOT.joinpath(*module.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((each for each in files if each.is_file()), None)


def all_imported(module):
    """Return the modules that one imports, and those that its own code's modules import."""
    found, pending = set(), [module]
    while pending:
        new = set(imported(file)) if (file := file_of(pending.pop())) else set()
        pending += new - found
        found |= new
    return found


def test_the_check_needs_neither_ray_nor_a_transport():
    """A machine with a GPU may have torch, transformers and triton alone."""
    packages = {each.partition(".")[0] for each in all_imported("benchmarks.gpu_check")}
    assert {"benchmarks", "specdec", "torch"} <= packages
    assert not packages & {"cluster", "fastapi", "grpc", "msgpack", "ray", "zmq"}


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
