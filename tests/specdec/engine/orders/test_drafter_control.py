"""Orders for the versions of a draft head; on an engine without a model."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

from specdec.engine.loaded.drafter_versions import DrafterVersions
from specdec.engine.orders import drafter_control
from specdec.engine.orders.drafter_control import LOAD_TIMEOUT_S, DrafterControl
from specdec.types.drafters import DrafterOrder, HeadFile
from specdec.types.errors import NotReadyError, UnsupportedModelError
from tests.specdec.engine.loaded.test_drafter_versions import Ranks


class Thread:
    """The thread of an engine that is idle."""

    async def call(self, function):
        return function()


@pytest.fixture
def ranks():
    return Ranks()


@pytest.fixture
def control(ranks, monkeypatch):
    versions = DrafterVersions(HeadFile(1, "configured", "/heads/1"))
    engine = SimpleNamespace(advance_drafters=lambda: versions.advance(ranks))
    seconds = itertools.count(0, LOAD_TIMEOUT_S / 2)
    control = DrafterControl(engine, versions, None, clock=lambda: next(seconds))
    monkeypatch.setattr(control, "_checked", Path)
    return control


async def test_a_draft_model_on_the_ranks_has_one_version(monkeypatch):
    served = SimpleNamespace(max_loaded_versions=1, method="colocated_draft_model")
    versions = DrafterVersions(HeadFile(1, "configured", "/heads/1"))
    control = DrafterControl(SimpleNamespace(), versions, served)
    monkeypatch.setattr(drafter_control, "resolve", lambda path, **_: Path(path))
    with pytest.raises(UnsupportedModelError, match="colocated_draft_model cannot be replaced"):
        await load(control, "org/other")


def load(control, path):
    return control.execute(DrafterOrder(path=path), Thread(), "r1")


async def test_a_relative_path_is_reported_as_an_absolute_one(control, tmp_path, monkeypatch):
    (tmp_path / "head").mkdir()
    monkeypatch.chdir(tmp_path)
    report = await load(control, "head")
    assert [each.name for each in report.versions] == [
        "configured",
        str(tmp_path.resolve() / "head"),
    ]
    report = await load(control, "org/head")
    assert report.versions[-1].name == "org/head"


async def test_a_version_that_loads_for_long_is_used_later(control, ranks):
    ranks.fault = None
    with pytest.raises(
        NotReadyError, match=r"version 2 of the head is still loading; see `specdec"
    ):
        await load(control, "org/head")
    ranks.fault = ""
    report = await control.execute(DrafterOrder(is_pinned=True), Thread(), "r1")
    assert report.versions[-1].state == "loading"
    control._is_settled()
    report = await control.execute(DrafterOrder(), Thread(), "r1")
    assert report.versions[-1].state == "active"


async def test_files_that_a_rank_cannot_load_are_not_valid(control, ranks):
    ranks.fault = "rank 0: weights with NaN"
    with pytest.raises(UnsupportedModelError, match="org/head, cannot be used: rank 0: weights"):
        await load(control, "org/head")
