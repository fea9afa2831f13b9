"""The process that runs when idle, and the command that governs it: they end together."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from cluster.cli.training import idle_time
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it is governed on Linux only")

PROGRAM = """
import os, sys, time
from cluster.cli.training.idle_time import run_when_idle
run_when_idle(1)
try:
    print(os.getpid(), os.getsid(0), flush=True)
    time.sleep(float(sys.argv[1]))
except KeyboardInterrupt:
    sys.exit(7)
sys.exit(5)
"""


@pytest.fixture
def start():
    commands = []

    def start(seconds):
        """Return the command, and its process once that runs when idle."""
        words = [sys.executable, "-c", PROGRAM, str(seconds)]
        commands.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        pid, session = map(int, commands[-1].stdout.readline().split())
        assert pid == session != commands[-1].pid
        return commands[-1], psutil.Process(pid)

    yield start
    for each in commands:
        each.kill()
        each.wait(60)


def test_it_has_the_least_share(start):
    _, process = start(600)
    assert os.sched_getscheduler(process.pid) == os.SCHED_IDLE


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="no sessions share the CPU")
def test_its_session_has_the_least_share(start):
    _, process = start(600)
    found, own = (Path(f"/proc/{each}/autogroup").read_text() for each in (process.pid, "self"))
    assert found.split()[1:] == ["nice", "19"]
    assert found.split()[0] not in own.split()  # a container's first session may have no group


def test_the_exit_code_is_that_of_the_process(start):
    command, _ = start(0)
    assert command.wait(60) == 5


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 7), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_signal_to_the_command_ends_both(start, number, exit_code, is_stopped):
    command, process = start(600)
    if is_stopped:
        process.suspend()
    command.send_signal(number)
    assert command.wait(60) == exit_code
    assert not process.is_running()


def test_ctrl_z_stops_both_until_the_command_goes_on(start):
    command, process = start(600)
    own = psutil.Process(command.pid)
    command.send_signal(signal.SIGTSTP)
    wait_until(lambda: own.status() == process.status() == psutil.STATUS_STOPPED)
    statuses = set()
    for _ in range(20):
        statuses.add(process.status())
        time.sleep(0.05)
    assert statuses == {psutil.STATUS_STOPPED}
    command.send_signal(signal.SIGCONT)
    wait_until(lambda: process.status() != psutil.STATUS_STOPPED)
    command.send_signal(signal.SIGTERM)
    assert command.wait(60) == 143


SIGNAL_AT_THE_FORK = """
import os, signal
fork = os.fork
def fork_and_end():
    if pid := fork():
        os.kill(os.getpid(), signal.SIGTERM)
    return pid
os.fork = fork_and_end
"""


def test_a_signal_before_the_process_runs_when_idle_ends_both():
    command = [sys.executable, "-c", SIGNAL_AT_THE_FORK + PROGRAM, "600"]
    assert subprocess.run(command, timeout=60).returncode == 143


def test_the_exit_code_is_that_of_the_process_where_signals_of_children_are_ignored():
    command = [sys.executable, "-c", PROGRAM, "0"]
    ignored = partial(signal.signal, signal.SIGCHLD, signal.SIG_IGN)
    assert subprocess.run(command, preexec_fn=ignored, timeout=60).returncode == 5


@pytest.mark.parametrize("is_stopped", [True, False])
def test_it_ends_with_a_command_that_is_killed(start, is_stopped):
    command, process = start(600)
    command.send_signal(signal.SIGSTOP)
    if is_stopped:
        process.suspend()
    command.kill()
    process.wait(60)


def test_a_command_whose_process_is_killed_has_the_code_of_a_shell(start):
    command, process = start(600)
    process.kill()
    assert command.wait(60) == 128 + signal.SIGKILL


def test_it_is_stopped_while_others_use_the_cores(start):
    _, process = start(600)
    words = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(words) for _ in os.sched_getaffinity(0)]
    try:
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
        wait_until(lambda: process.status() != psutil.STATUS_STOPPED)  # in one period of twelve
    finally:
        for each in others:
            each.kill()
            each.wait(60)


@pytest.mark.parametrize(
    ("num_cores", "num_threads", "limit"), [(8, 1, 6.75), (8, 8, 0.25), (1, 1, 0.25), (2, 1, 0.75)]
)
def test_others_may_use_the_cores_of_its_affinity_that_it_leaves(
    monkeypatch, num_cores, num_threads, limit
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(num_cores))
    assert idle_time._limit(num_threads) == limit
