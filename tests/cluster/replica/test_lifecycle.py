"""The states of a replica: loading, then serving."""

from dataclasses import fields
from types import SimpleNamespace

import pytest

from cluster.replica.lifecycle import Loading, Serving
from specdec.engine.lifecycle import SpeculationSettings
from specdec.types.control import SpeculationControl
from specdec.types.errors import NotReadyError, TargetFailedError
from specdec.types.reports.stats import AdaptersInUse, EngineReport, EngineStats

GONE = TargetFailedError("gone")
CONTROL = SpeculationControl("off", threshold=8, num_speculative_tokens=3)


@pytest.mark.parametrize("before", [None, SpeculationControl("on", 8, 3)])
async def test_a_loading_replica_keeps_settings_for_its_engine(before):
    settings = SpeculationSettings(before)
    await Loading("r1", settings).apply_control(CONTROL)
    assert settings.control == (None if before is None else CONTROL)


async def test_a_loading_replica_refuses_requests_and_has_none_to_wait_for():
    loading = Loading("r1", SpeculationSettings(None))
    with pytest.raises(NotReadyError, match="still loading"):
        loading.running_engine()
    await loading.check_models()
    await loading.drain(60.0)
    await loading.close()
    assert (loading.load_in_requests(), loading.failure) == (0.0, None)
    report = loading.report(speculation_version=3)
    assert (report.is_ready, report.reason) == (False, "the model is loading")


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({}, ""),
        ({"is_draining": True}, "it is draining"),
        ({"is_recovering": True, "is_draining": True}, "the model is starting again"),
        (
            {"failure": TargetFailedError("gone"), "is_recovering": True},
            "the model stopped answering",
        ),
    ],
)
def test_why_a_serving_replica_is_not_ready(state, reason):
    thread = SimpleNamespace(
        **{"failure": None, "is_recovering": False, "is_draining": False, **state}
    )
    serving = Serving("r1", SimpleNamespace(thread=thread), None, None)
    assert serving.why_not_ready == reason


def test_a_report_has_the_readings_of_the_engine():
    stats = EngineStats(
        num_blocks=8,
        num_free_blocks=6,
        num_kv_blocks=8,
        block_size=16,
        max_loras=2,
        adapters_in_use=AdaptersInUse(("sql",), ("chat",)),
        at_s=5.0,
    )
    thread = SimpleNamespace(failure=None, is_recovering=False, is_draining=False)
    models = SimpleNamespace(can_draft=False, is_draft_up=None, places_on=lambda address: ())
    engine = SimpleNamespace(thread=thread, stats=lambda: stats)
    report = Serving("r1", engine, models, None).report(speculation_version=3)
    shared = [each.name for each in fields(EngineReport)]
    assert [getattr(report, each) for each in shared] == [getattr(stats, each) for each in shared]


async def test_the_models_are_checked_while_they_run():
    thread = SimpleNamespace(failure=None, is_recovering=False)
    checked = []

    async def check(thread):
        checked.append(thread)

    engine, models = SimpleNamespace(thread=thread), SimpleNamespace(check=check)
    serving = Serving("r1", engine, models, None)
    await serving.check_models()
    thread.is_recovering = True
    await serving.check_models()
    assert checked == [thread]
    thread.failure = GONE
    with pytest.raises(TargetFailedError):
        await serving.check_models()
