"""Values of `auto`, and the load of other processes."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

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


HZ = os.sysconf("SC_CLK_TCK")


class Machine:
    """Seconds of work by core, and of a process; cores 2 and 3 of those online are its own."""

    def __init__(self, system_times):
        self._system_times = system_times
        self._work_s, self._own_s, self.clock = {0: 5.0, 2: 0.0, 3: 0.0}, 1.0, 0.0
        self.process = SimpleNamespace(cpu_times=self._cpu_times)
        self.work({})

    def _cpu_times(self):
        return SimpleNamespace(user=self._own_s - 0.25, system=0.25, children_user=9.0)

    def work(self, seconds, own_s=0.0):
        """Let cores work, and write their times as the kernel does: core 1 is offline."""
        self._own_s += own_s
        for core, each in seconds.items():
            self._work_s[core] += each
        ticks = {core: round(each * HZ) for core, each in self._work_s.items()}
        lines = [f"cpu{core} {each - 6} 1 1 900 50 1 2 1 7 7" for core, each in ticks.items()]
        self._system_times.write_text("\n".join(["cpu  9 9 9 9 9 9 9 9 9 9", *lines, "intr 9 9"]))


@pytest.fixture
def machine(monkeypatch, tmp_path):
    machine = Machine(tmp_path / "stat")
    monkeypatch.setattr(hardware, "_SYSTEM_TIMES", tmp_path / "stat")
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda _: {2, 3})
    monkeypatch.setattr(hardware.psutil, "Process", lambda: machine.process)
    monkeypatch.setattr(hardware.time, "monotonic", lambda: machine.clock)
    return machine


@pytest.mark.parametrize(
    ("others_s", "own_s", "share"), [(0.0, 0.0, 0.0), (0.3, 0.0, 0.5), (0.3, 0.3, 0.5), (9, 0, 1)]
)
def test_the_load_of_others_is_without_this_process_and_other_cores(
    machine, others_s, own_s, share
):
    def sleep(seconds):
        machine.clock += seconds
        machine.work({0: 7.0, 2: others_s, 3: own_s}, own_s)

    assert LoadOfOthers().share(0.3, sleep) == pytest.approx(share)


def test_the_time_since_the_load_was_first_read_counts(machine):
    load, waits = LoadOfOthers(), []
    machine.clock += 1.0
    machine.work({2: 0.5})
    assert load.share(0.3, waits.append) == pytest.approx(0.25)
    assert waits == [0.0]


def test_the_load_is_read_again_without_that_of_a_process(machine):
    load = LoadOfOthers(machine.process)
    machine.clock += 2.0
    machine.work({2: 2.0, 3: 1.0}, own_s=1.5)
    assert load.num_cores() == pytest.approx(0.75)
    machine.clock += 0.5
    machine.work({3: 0.5}, own_s=0.25)
    assert load.num_cores() == pytest.approx(0.5)
    assert load.num_cores() == 0


def test_the_load_of_this_machine_is_that_of_its_cores():
    others = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        load = LoadOfOthers()
        time.sleep(1)
        with_other = load.num_cores()
    finally:
        others.kill()
        others.wait(60)
    assert 0.3 < with_other <= len(os.sched_getaffinity(0)) + 0.2
