"""The table of drafters: places, what is chosen by whom, and why not a faster one."""

from dataclasses import replace

import pytest

from cluster.cli.training.drafter_report import DrafterSpeedReport
from specdec.config.model_aliases import ShippedDrafter
from specdec.llm.drafter_speeds import DrafterSpeeds

DRAFTERS = (
    ShippedDrafter("head", "eagle3", 2),
    ShippedDrafter("draft", "colocated_draft_model", 2),
    ShippedDrafter("suffix", "suffix", 2, has_weights=False),
)


@pytest.fixture
def speeds():
    gains = {"head": (1.6,) * 5, "draft": (2.0,) * 5, "suffix": (1.2,) * 5}
    return DrafterSpeeds((100.0,) * 5, gains)


def with_draft(speeds, *rounds):
    return replace(speeds, gains={**speeds.gains, "draft": rounds})


def test_drafters_are_listed_by_speed(speeds):
    assert DrafterSpeedReport.of(DRAFTERS, speeds).lines() == [
        "expected speed of one stream, medians of 5 alternating rounds",
        "drafter    runs in         tokens/s  gain  rounds",
        "draft      target's ranks  200       2.00  2.00 to 2.00  chosen",
        "head       target's ranks  160       1.60  1.60 to 1.60",
        "suffix     engine          120       1.20  1.20 to 1.20",
        "no drafts                  100       1.00",
    ]


def test_equally_fast_drafters_are_named(speeds):
    report = DrafterSpeedReport.of(DRAFTERS, with_draft(speeds, 1.5, 1.55, 1.6, 1.65, 1.7))
    assert report.notes == ["head is the default of the equally fast head, draft"]
    assert report.is_settled
    assert [row.name for row in report.rows if row.is_chosen] == ["head"]


def test_rounds_that_differ_are_reported(speeds):
    report = DrafterSpeedReport.of(DRAFTERS, with_draft(speeds, 1.2, 1.4, 1.6, 1.8, 2.0))
    assert report.lines()[-1] == (
        "drafter head, the default: speeds differ by 25% between rounds, as under other load; "
        "they are not stored"
    )
    assert not report.fields()["is_settled"]
