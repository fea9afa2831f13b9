"""A small run of the policy benchmark, which must meet the same aims."""

import itertools
import json

import pytest

from benchmarks import control, control_page
from benchmarks.control import (
    ACCEPTANCE,
    CURVES,
    LEAST_OFF_SHARE,
    LEAST_SLOT_GAIN,
    MOST_REGRET,
    STREAMS,
    Settings,
    measure,
    sequences_of,
)
from benchmarks.control_page import Result
from tests.specdec.speculation.policy.synthetic_service import expected_accepted


def cases():
    """Return all combinations; by default those run that have each pair of two values once."""
    axes = (list(CURVES), [*list(ACCEPTANCE)[1:4]], [1, 8, 64])
    for indices in itertools.product(range(3), repeat=3):
        marks = () if sum(indices) % 3 == 0 else (pytest.mark.slow,)
        values = [axis[index] for axis, index in zip(axes, indices, strict=True)]
        yield pytest.param(*values, marks=marks)


@pytest.mark.parametrize(("curve", "acceptance", "num_streams"), [*cases()])
def test_auto_is_close_to_the_best_fixed_number(curve, acceptance, num_streams):
    settings = Settings(num_rounds=2, round_s=30.0, round_steps=400)
    result = measure(curve, acceptance, num_streams, settings)
    assert result.regret <= MOST_REGRET
    assert result.off_share >= LEAST_OFF_SHARE


def test_the_regret_is_that_of_equal_lengths():
    """Where slots that are left out would gain, auto is not better than the best fixed number."""
    result = measure("gpu", "5.04 of 7", 32, Settings(num_rounds=1, round_s=10.0, round_steps=200))
    assert result.regret > -0.005


def wrong_tables():
    """Return errors of the table, each with a load that it would keep from the best length."""
    loads = (("small gpu", "good", 16), ("cpu", "medium", 8), ("small gpu", "bad", 1))
    for part in ("drafts", "making", "rows", "all", "batch"):
        for factor, load in itertools.product((0.5, 2.0, 3.0), loads):
            is_quick = (part, factor, load[2]) in (("drafts", 0.5, 8), ("making", 2.0, 1))
            marks = () if is_quick else (pytest.mark.slow,)
            yield pytest.param(part, factor, *load, marks=marks)


@pytest.mark.parametrize(
    ("part", "factor", "curve", "acceptance", "num_streams"), [*wrong_tables()]
)
def test_a_wrong_table_is_corrected(part, factor, curve, acceptance, num_streams):
    """A minute and a thousand steps are enough."""
    settings = Settings(1, 60.0, 1000, 30.0, 400, wrong_by=factor, wrong_part=part)
    result = measure(curve, acceptance, num_streams, settings)
    assert result.regret <= MOST_REGRET
    assert result.off_share >= 0.98


def test_sequences_have_the_acceptance_length_on_average():
    found = sequences_of(2.49, 3)
    assert len(set(found)) == 5
    lengths = [1 + expected_accepted(rates[:3]) for rates in found]
    assert sum(lengths) / len(lengths) == pytest.approx(2.49, abs=1e-4)


def test_json_page_and_chart_are_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(control, "CURVES", {"cpu": CURVES["cpu"]})
    monkeypatch.setattr(control, "STREAMS", STREAMS[:2])
    monkeypatch.setattr(control, "SLOT_STREAMS", (2,))
    monkeypatch.setattr(control, "DRAFT_S", {"head": 0.0003})
    path = tmp_path / "control.json"
    flags = ["--rounds", "1", "--learn-s", "1", "--round-s", "1"]
    status = control.main([*flags, "--output", str(path)])
    report, summary = json.loads(path.read_text()), json.loads(capsys.readouterr().out)
    assert len(report["results"]) == 2 * len(ACCEPTANCE) == summary["num_cases"]
    assert len(report["slots_left_out"]) == 2
    assert {
        each: report[each] for each in ("regret", "off_share", "slots")
    }.items() <= summary.items()
    is_met = report["regret"] <= MOST_REGRET and report["off_share"] >= LEAST_OFF_SHARE
    assert status == (not (is_met and report["slots"] >= LEAST_SLOT_GAIN))
    page = path.with_suffix(".md").read_text()
    assert page.count("\n| cpu |") == len(ACCEPTANCE)
    gains = [f"| {each['gain']:.3f} |" for each in report["slots_left_out"]]
    assert [line[-9:] for line in page.splitlines() if line.startswith("| head, 0.3 ms")] == gains
    title, drawn = "cpu: regret of auto, % of the best fixed number", path.with_suffix(".svg")
    lines = [f'id="{title}: {each}"' for each in (*ACCEPTANCE, "aim")]
    assert [drawn.read_text().count(each) for each in lines] == [1] * len(lines)


def test_the_charts_show_the_regret_and_its_aim(monkeypatch):
    drawn = []
    monkeypatch.setattr(control_page, "draw_charts", drawn.extend)
    results = [
        Result(curve, "good", num_streams, (50.0, 100.0), speed, {1: 9}, 0)
        for curve, speeds in (("gpu", (101.0, 97.5)), ("cpu", (100.0, 98.0)))
        for num_streams, speed in zip((8, 1), speeds, strict=True)
    ]
    control_page.charts(results, 0.03)
    assert [each.title.partition(":")[0] for each in drawn] == ["gpu", "cpu"]
    assert [each.x for each in drawn] == [[1, 8]] * 2
    series = [{"good": [2.5, -1.0], "aim": [3.0, 3.0]}, {"good": [2.0, 0.0], "aim": [3.0, 3.0]}]
    assert [each.series for each in drawn] == [
        {name: pytest.approx(y) for name, y in lines.items()} for lines in series
    ]
