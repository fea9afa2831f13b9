"""The states of an engine: loaded, running, stopped."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from specdec.engine.lifecycle import LoadedEngine, SpeculationSettings
from specdec.engine.metrics.metrics import Metrics
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.types.adapters import AdapterOrder
from specdec.types.control import SpeculationControl
from specdec.types.drafters import DrafterOrder
from specdec.types.errors import InvalidValueError, NotReadyError
from specdec.types.reports.stats import Counts
from tests.specdec.engines import HashTarget, ScriptedProposer, engine_config, make_engine, request

ON = SpeculationControl("on", threshold=8, num_speculative_tokens=3)
OFF = replace(ON, mode="off")
MODELS = SimpleNamespace(
    counts=Counts(num_target_restarts=2),
    restart_target=None,
    mark_target_lost=None,
    forgive_losses=lambda: None,
)


@pytest.fixture
def loaded(tiny_model_dir):
    policy = SpeculationPolicy(ON, clock=lambda: 0.0, dwell_s=0.0)
    target = HashTarget(block_size=4, vocab_size=383)
    proposer = ScriptedProposer(target.continuation)
    engine = make_engine(tiny_model_dir, engine_config(3), target, proposer, policy)
    return LoadedEngine(engine, MODELS, Metrics(), SpeculationSettings(ON))


async def generated(running):
    outputs = running.thread.generate(request("r", (1, 2, 3), max_tokens=4, ignore_eos=True))
    return [token async for output in outputs for token in output.token_ids]


async def test_the_stats_stay_when_the_engine_ends(loaded):
    assert (loaded.stats().mode, loaded.stats().counts.num_target_restarts) == ("on", 2)
    running = loaded.start_thread()
    assert len(await generated(running)) == 4
    running.set_control(OFF)
    stopped = running.stop()
    assert (stopped.stats().mode, stopped.last_stats.counts.num_generated_tokens) == ("off", 4)
    assert stopped.stop() is stopped
    for call in (stopped.on_running_loop, lambda: stopped.set_control(ON)):
        with pytest.raises(NotReadyError, match="shut down"):
            call()


def test_stats_have_the_time_of_reading(loaded, monkeypatch):
    for now_s in (5.0, 7.0):
        monkeypatch.setattr("time.time", lambda now_s=now_s: now_s)
        assert loaded.stats().at_s == now_s


async def test_settings_of_the_time_of_loading_are_in_force_when_the_thread_starts(loaded):
    loaded.settings.control = OFF
    running = loaded.start_thread()
    assert running.stats().mode == "off"
    await running.apply_control(ON)
    assert running.stats().mode == "on"
    running.stop()


async def test_without_a_drafter_settings_change_nothing(loaded):
    running = replace(loaded, settings=SpeculationSettings(None)).start_thread()
    await running.apply_control(ON)
    assert running.stats().mode == ""
    running.stop()


def test_the_thread_follows_the_event_loop(loaded):
    async def run(engine):
        running = engine.on_running_loop()
        assert running.on_running_loop() is running
        await generated(running)
        return running

    first = asyncio.run(run(loaded))
    second = asyncio.run(run(first))
    assert second.thread is not first.thread
    second.stop()


async def test_orders_for_what_is_not_configured_are_refused(loaded):
    running = loaded.start_thread()
    with pytest.raises(InvalidValueError, match="a service with a draft head"):
        await running.order_drafter(DrafterOrder())
    with pytest.raises(InvalidValueError, match="--enable-lora"):
        await running.order_adapter(AdapterOrder())
    running.stop()
