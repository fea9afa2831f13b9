"""Orders for adapters beside requests: what is held, and on which thread files are looked up."""

import asyncio
import threading

import pytest

from specdec.config.engine import AdapterLimits
from specdec.engine.engine_thread import EngineThread
from specdec.engine.orders import adapter_control
from specdec.engine.orders.adapter_control import AdapterControl
from specdec.types.adapters import AdapterOrder, LoRARequest
from specdec.types.errors import InvalidValueError, ModelNotFoundError, UnsupportedModelError
from specdec.types.reports.stats import AdaptersInUse
from tests.specdec.adapters import adapter_dir
from tests.specdec.engines import engine_config, local_engine

LIMITS = AdapterLimits(max_loras=1, max_rank=16, max_loaded=2)


@pytest.fixture(scope="module")
def paths(tiny_model_dir, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: str(adapter_dir(root / name, tiny_model_dir, seed=seed))
        for seed, name in enumerate(("sql", "chat"))
    }


@pytest.fixture
def engine(tiny_model_dir):
    return local_engine(tiny_model_dir, engine_config(0, adapters=LIMITS))


@pytest.fixture
def control(engine, paths):
    control = AdapterControl(engine, engine.adapters, LIMITS, "tiny")
    control.load_all([AdapterOrder.load("sql", paths["sql"])])
    return control


@pytest.fixture
async def thread(engine, control):
    thread = EngineThread(engine)
    yield thread
    await thread.close()


async def hold(control, lora, thread):
    async with control.holding(lora, thread):
        raise AssertionError("it was cancelled before")


async def test_a_caller_that_is_cancelled_while_it_waits_holds_nothing(control, thread):
    gate = threading.Event()
    thread.post(gate.wait)
    waiting = asyncio.create_task(hold(control, LoRARequest("sql", 1), thread))
    await asyncio.sleep(0)  # its command waits at the gate
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.set()
    report = await control.execute(AdapterOrder.unload("sql"), thread, "r1")
    assert report.adapters == ()


async def test_a_held_adapter_is_kept_until_its_caller_leaves(control, thread):
    async with control.holding(LoRARequest("sql", 1), thread):
        report = await control.execute(AdapterOrder.unload("sql"), thread, "r1")
        assert [each.state for each in report.adapters] == ["unloading"]
    assert (await control.execute(AdapterOrder(), thread, "r1")).adapters == ()


async def test_files_are_looked_up_beside_the_event_loop_and_the_engine(
    engine, control, thread, paths, monkeypatch
):
    seen = []

    def portable_name(name):
        seen.append(threading.current_thread())
        return name

    monkeypatch.setattr(adapter_control, "portable_name", portable_name)
    async with control.holding(LoRARequest("sql", 1, paths["sql"]), thread) as adapter_id:
        assert adapter_id == engine.adapters.ids["sql"]
    assert len(seen) == 1
    assert seen[0] not in (thread._thread, threading.current_thread())


async def test_an_order_to_load_can_be_repeated(engine, control, thread, paths):
    """As where only some replicas have executed it."""
    before = engine.adapters.ids["sql"]
    report = await control.execute(AdapterOrder.load("sql", paths["sql"]), thread, "r1")
    assert [each.name for each in report.adapters] == ["sql"]
    assert engine.stats().adapters_in_use == AdaptersInUse(loaded=("sql",))
    assert engine.adapters.ids["sql"] == before
    with pytest.raises(InvalidValueError, match="a name that no loaded adapter has"):
        await control.execute(AdapterOrder.load("sql", paths["chat"]), thread, "r1")
    order = AdapterOrder.load("sql", paths["sql"], replaces=True)
    await control.execute(order, thread, "r1")
    assert engine.adapters.ids["sql"] != before


async def test_a_replaced_adapter_leaves_its_place_to_the_next(control, thread, paths):
    """Also where no request follows: at most two are loaded."""
    for _ in range(3):
        order = AdapterOrder.load("sql", paths["chat"], replaces=True)
        report = await control.execute(order, thread, "r1")
        assert [each.state for each in report.adapters] == ["ready"]
    report = await control.execute(AdapterOrder.load("chat", paths["chat"]), thread, "r1")
    assert [each.name for each in report.adapters] == ["sql", "chat"]


async def test_no_idle_adapter_is_unloaded_for_one_that_cannot_be_loaded(
    engine, control, thread, paths, tiny_model_dir, tmp_path
):
    """All places are taken; missing files, a rank above the limit, another model."""
    await control.execute(AdapterOrder.load("chat", paths["chat"]), thread, "r1")
    large = adapter_dir(tmp_path / "large", tiny_model_dir, rank=LIMITS.max_rank + 1)
    other = AdapterControl(engine, engine.adapters, LIMITS, "tiny", layers={"lm_head": (8, 8)})
    for each, path in (
        (control, str(tmp_path / "missing")),
        (control, str(large)),
        (other, paths["sql"]),
    ):
        with pytest.raises((ModelNotFoundError, UnsupportedModelError)):
            await hold(each, LoRARequest("new", 3, path), thread)
        assert list(engine.adapters.ids) == ["sql", "chat"]


async def test_no_idle_adapter_is_unloaded_for_one_that_is_being_loaded(
    engine, control, thread, paths
):
    """Both fit: by max_cpu_loras there is room for two."""
    order = AdapterOrder.load("chat", paths["chat"])
    await thread.call(lambda: control._order_load(order, control._checked(order)))
    async with control.holding(LoRARequest("chat", 2, paths["chat"]), thread):
        assert list(engine.adapters.ids) == ["sql", "chat"]


async def test_an_order_that_is_repeated_while_it_is_executed_waits(control, thread, paths):
    """As by a client whose time limit is shorter than the load."""
    order = AdapterOrder.load("chat", paths["chat"])
    reports = await asyncio.gather(*[control.execute(order, thread, "r1") for _ in range(5)])
    for report in reports:
        assert [each.name for each in report.adapters] == ["sql", "chat"]
    with pytest.raises(InvalidValueError, match="a name that no loaded adapter has"):
        await control.execute(AdapterOrder.load("chat", paths["sql"]), thread, "r1")
