"""Values of `auto`, and the load of other processes."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest

from specdec.config import hardware
from specdec.config.hardware import LoadOfOthers, resolved_device


@pytest.mark.parametrize(
    ("has_driver", "finds_gpu", "device"),
    [(True, True, "cuda"), (True, False, "cpu"), (False, True, "cpu")],
)
def test_auto_takes_a_gpu_where_torch_finds_one(
    monkeypatch, tmp_path, has_driver, finds_gpu, device
):
    driver = tmp_path if has_driver else tmp_path / "missing"
    monkeypatch.setattr("specdec.config.hardware._GPU_DRIVERS", (driver,))
    monkeypatch.setattr("torch.cuda.is_available", lambda: finds_gpu)
    assert resolved_device("auto") == device
    assert resolved_device("cpu") == "cpu"


@pytest.fixture
def machine(monkeypatch):
    """Return seconds of work by core, and of this process; cores 1 and 2 of three are its own."""
    state = SimpleNamespace(cores=[5.0, 0.0, 0.0], own=1.0, clock=0.0)

    def cpu_times(percpu):
        assert percpu
        return [Times(user=each) for each in state.cores]

    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda _: {1, 2})
    monkeypatch.setattr(hardware.psutil, "cpu_times", cpu_times)
    monkeypatch.setattr(hardware.time, "process_time", lambda: state.own)
    monkeypatch.setattr(hardware.time, "monotonic", lambda: state.clock)
    return state


class Times(NamedTuple):
    """Seconds of a core, as psutil has them."""

    user: float
    idle: float = 100.0
    iowait: float = 50.0
    guest: float = 0.0
    guest_nice: float = 0.0


@pytest.mark.parametrize(
    ("others_s", "own_s", "share"), [(0.0, 0.0, 0.0), (0.3, 0.0, 0.5), (0.3, 0.3, 0.5), (9, 0, 1)]
)
def test_the_load_of_others_is_without_this_process_and_other_cores(
    machine, others_s, own_s, share
):
    def sleep(seconds):
        machine.clock += seconds
        machine.cores[0] += 7.0
        machine.cores[1] += others_s
        machine.cores[2] += own_s
        machine.own += own_s

    assert LoadOfOthers().share(0.3, sleep) == pytest.approx(share)


def test_the_time_since_the_load_was_first_read_counts(machine):
    load, waits = LoadOfOthers(), []
    machine.clock += 1.0
    machine.cores[1] += 0.5
    assert load.share(0.3, waits.append) == pytest.approx(0.25)
    assert waits == [0.0]
