"""The table of drafters: places, what is chosen by whom, and why not a faster one."""

from dataclasses import replace

import pytest

from cluster.cli.drafter_report import DrafterReport
from specdec.config.model_aliases import ShippedDrafter
from specdec.llm.drafter_speeds import DrafterSpeeds

DRAFTERS = (
    ShippedDrafter("head", "eagle3", 2),
    ShippedDrafter("draft", "draft_model", 2),
    ShippedDrafter("suffix", "suffix", 2, has_weights=False),
)


@pytest.fixture
def speeds():
    gains = {"head": (1.6,) * 5, "draft": (2.0,) * 5, "suffix": (1.2,) * 5}
    return DrafterSpeeds((100.0,) * 5, gains, {"draft": (1.3,) * 5})


def test_a_draft_model_has_a_row_for_each_place(speeds):
    assert DrafterReport.of(DRAFTERS, speeds).lines() == [
        "expected speed of one stream, medians of 5 alternating rounds",
        "drafter    runs in           tokens/s  gain  rounds        chosen by",
        "draft      process of LLM    200       2.00  2.00 to 2.00  LLM",
        "head       target's ranks    160       1.60  1.60 to 1.60  service",
        "draft      separate process  130       1.30  1.30 to 1.30",
        "suffix     engine            120       1.20  1.20 to 1.20",
        "no drafts                    100       1.00",
    ]


def test_equally_fast_drafters_are_named(speeds):
    noisy = (1.5, 1.55, 1.6, 1.65, 1.7)
    report = DrafterReport.of(DRAFTERS, replace(speeds, apart={"draft": noisy}))
    assert report.notes == ["head has the least memory of the equally fast head, draft"]
    assert report.is_settled
    assert [row.name for row in report.rows if "service" in row.chosen_by] == ["head"]


def test_rounds_that_differ_are_reported(speeds):
    wide = (1.2, 1.4, 1.6, 1.8, 2.0)
    report = DrafterReport.of(DRAFTERS, replace(speeds, apart={"draft": wide}))
    assert report.lines()[-1] == (
        "drafter head, the default: speeds differ by 25% between rounds, as under other load; "
        "they are not stored"
    )
    assert not report.fields()["is_settled"]
