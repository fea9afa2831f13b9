# Modules: cluster.serve.guard, cluster.serve.signals
"""Every end of a guarded service: no process is left, and line and exit code name the reason."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from cluster.serve import guard
from cluster.serve.guard import EXIT_LOST, Guard, GuardedService
from tests.cluster.full_pipes import stderr_in_pipe
from tests.cluster.serve.guarded_program import STOP_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="guards exist on Linux only")

SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
PROGRAM = Path(__file__).with_name("guarded_program.py")


@dataclass
class Program:
    command: subprocess.Popen
    log: Path
    mark: str

    def processes(self):
        """Return the service and what it has started, by a mark in their environment."""
        return [each for each in psutil.process_iter() if self.mark in environment(each)]

    @property
    def guard(self):
        [guard] = psutil.Process(self.command.pid).children()
        return guard

    @property
    def service(self):
        return next(each for each in self.guard.children() if "guarded_program" in cmdline(each))

    def wait_for(self, line):
        until(lambda: line in self.log.read_text().splitlines())

    def end(self):
        """Return the exit code and the lines on standard error."""
        _, errors = self.command.communicate(timeout=60)
        return self.command.returncode, (errors or "").splitlines()


def environment(process):
    with suppress(OSError):
        return Path(f"/proc/{process.pid}/environ").read_bytes().decode(errors="replace")
    return ""


def cmdline(process):
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def until(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path):
    programs = []

    def start(scenario, line, **options):
        log, mark = tmp_path / "log", f"guarded-{os.getpid()}-{time.monotonic_ns()}"
        log.touch()
        environment = os.environ | {"LOG": str(log), "MARK": mark, "PYTHONPATH": str(Path.cwd())}
        command = subprocess.Popen(
            [sys.executable, str(PROGRAM), scenario],
            **{"env": environment, "stderr": subprocess.PIPE, "text": True, **options},
        )
        programs.append(Program(command, log, mark))
        if line:
            programs[-1].wait_for(line)
        return programs[-1]

    yield start
    for each in programs:
        each.command.kill()
        each.command.communicate()
        for process in each.processes():
            process.kill()


@pytest.mark.parametrize(("number", "exit_code"), SIGNALS)
@pytest.mark.parametrize("count", [1, 2])
def test_a_signal_while_it_starts_ends_it_at_once(start, number, exit_code, count):
    program = start("starts", "started")
    until(lambda: len(program.processes()) == 5)  # the service and what it has started
    for _ in range(count):
        program.command.send_signal(number)
    line = f"stopped by {signal.Signals(number).name} before the service was ready"
    assert program.end() == (exit_code, [line])  # one that is waited for has another line
    assert program.processes() == []


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.1, 0.15, 0.2])
def test_a_signal_before_it_starts_processes(start, delay_s):
    program = start("starts", None)
    time.sleep(delay_s)
    program.command.terminate()
    exit_code, _ = program.end()
    assert exit_code in (-signal.SIGTERM, 143)
    assert program.processes() == []


def test_a_killed_command_leaves_no_process(start):
    for scenario, line in (("starts", "started"), ("serves", "ready")):
        program = start(scenario, line)
        program.command.kill()
        assert program.end() == (-9, ["error: the command was killed, so the service has ended"])
        assert program.processes() == []


def test_a_killed_guard_leaves_no_process(start):
    program = start("serves", "ready")
    guard = program.guard.pid
    os.kill(guard, signal.SIGKILL)
    line = f"error: the guard process {guard} was killed, so the service has ended"
    assert program.end() == (EXIT_LOST, [line])
    assert program.processes() == []


def test_a_killed_service_leaves_no_process(start):
    program = start("serves", "ready")
    program.service.kill()
    line = "error: the service process was killed by SIGKILL"
    assert program.end() == (EXIT_LOST, [line])
    assert program.processes() == []


def test_command_and_service_killed_together_by_name_leave_no_process(start):
    program = start("serves", "ready")
    guard, service = program.guard, program.service
    assert PROGRAM.name not in cmdline(guard)
    service.kill()
    program.command.kill()
    until(lambda: not guard.is_running())
    assert program.processes() == []


def test_command_and_guard_are_small_and_have_no_secrets(start):
    program = start("serves", "ready")
    for each in (psutil.Process(program.command.pid), program.guard):
        assert each.environ() == {}
        assert each.memory_info().rss < 20 * 2**20
        assert each.num_threads() == 1


def test_the_command_keeps_its_words_and_its_name(start):
    program = start("serves", "ready")
    command = psutil.Process(program.command.pid)
    assert command.cmdline()[-2:] == [str(PROGRAM), "serves"]
    assert command.name() == program.service.name()


@pytest.mark.parametrize("number", [number for number, _ in SIGNALS])
def test_a_ready_service_drains_and_exits_with_0(start, number):
    program = start("serves", "ready")
    program.command.send_signal(number)
    assert program.end() == (0, [])
    assert program.log.read_text().split() == ["ready", "stopping"]
    assert program.processes() == []


def test_a_drain_may_take_the_longest_time(start):
    program = start("drains long", "ready")
    program.command.terminate()
    assert program.end() == (0, [])
    assert program.log.read_text().split() == ["ready", "stopping"]


def test_a_second_signal_aborts(start):
    program = start("hangs", "ready")
    program.command.send_signal(signal.SIGINT)
    program.wait_for("stopping")
    program.command.send_signal(signal.SIGINT)
    assert program.end() == (0, [])
    assert program.log.read_text().split() == ["ready", "stopping", "aborted"]
    assert program.processes() == []


def test_the_same_signal_for_every_process_aborts_nothing(start):
    program = start("serves", "ready")
    for pid in (program.service.pid, program.guard.pid, program.command.pid):
        os.kill(pid, signal.SIGTERM)
    assert program.end() == (0, [])
    assert program.log.read_text().split() == ["ready", "stopping"]


def test_a_service_that_does_not_stop_is_killed(start):
    program = start("hangs", "ready")
    program.command.terminate()
    line = f"the service did not stop within {STOP_S + 0.2:g} s and was killed"
    assert program.end() == (143, [line])
    assert program.processes() == []


@pytest.mark.parametrize(("is_stopping", "exit_code"), [(False, EXIT_LOST), (True, 143)])
def test_the_end_of_a_vital_process_is_reported(start, is_stopping, exit_code):
    program = start("hangs", "ready")
    raylet = next(each for each in program.service.children() if each.name() == "sleep")
    if is_stopping:
        program.command.terminate()
        program.wait_for("stopping")
    raylet.kill()
    found, [line] = program.end()
    assert found == exit_code
    assert f"Ray's raylet (process {raylet.pid}) has ended" in line
    assert program.processes() == []


def test_a_vital_process_that_ends_with_ray_is_no_failure(monkeypatch):
    """Since Linux 6.12, poll reports a hang-up for the descriptor of a process that was reaped."""
    signals, _ = os.pipe()
    os.set_blocking(signals, False)
    monkeypatch.setattr(guard, "_receive_signals", lambda: signals)
    monkeypatch.setattr(Guard, "_reap", lambda _: None)  # other children of the tests
    reports, to_guard = os.pipe()
    guarding = Guard(GuardedService(os.getpid(), reports, STOP_S, is_joined=False))
    with subprocess.Popen(["sleep", "300"]) as raylet:
        os.write(to_guard, f"{guard.VITAL} raylet {raylet.pid}\n".encode())
        guarding._handle_events()
        raylet.kill()
    os.write(to_guard, f"{guard.ENDING}\n".encode())  # is read after the poll has returned both
    guarding._handle_events()
    os.close(to_guard)
    guarding._handle_events()
    assert guarding._failure == ""


def test_a_failing_start_keeps_its_exit_code_and_message(start):
    program = start("fails", None)
    assert program.end() == (1, ["error: no memory"])
    assert program.processes() == []


def test_a_start_on_an_existing_cluster_is_interrupted_in_order(start):
    program = start("joins", "started")
    program.command.terminate()
    line = "stopped by SIGTERM before the service was ready"
    assert program.end() == (143, [line])
    assert program.log.read_text().split() == ["started", "interrupted"]


def test_nohup_is_respected(start):
    def ignore_sighup():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    program = start("serves", "ready", preexec_fn=ignore_sighup)
    for pid in (program.command.pid, program.guard.pid, program.service.pid):
        os.kill(pid, signal.SIGHUP)
    time.sleep(0.5)
    assert program.command.poll() is None
    assert program.log.read_text().split() == ["ready"]
    program.command.terminate()
    assert program.end() == (0, [])


def test_a_closed_terminal_ends_it(start):
    """The terminal sends SIGHUP, and nothing can be printed any more."""
    controller, terminal = os.openpty()
    program = start("serves", "ready", stderr=terminal, start_new_session=True)
    os.close(terminal)
    os.close(controller)
    program.command.send_signal(signal.SIGHUP)
    assert program.end()[0] == 0
    assert program.processes() == []


def test_a_full_pipe_delays_no_end(start):
    """The reader of the log has stopped, and a blocking write would not return."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    program = start("hangs", "ready", stderr=writer)
    os.close(writer)
    program.command.terminate()
    assert program.end()[0] == 143
    assert program.processes() == []
    os.close(reader)


LONG = "x" * 2**20


def test_a_line_is_cut_where_nothing_reads_it():
    with stderr_in_pipe() as reader:
        guard.print_line(LONG, timeout_s=0.01)
        assert 0 < len(os.read(reader, len(LONG))) < len(LONG)


def test_a_line_waits_for_its_reader():
    with stderr_in_pipe() as reader, ThreadPoolExecutor() as pool:
        printed = pool.submit(guard.print_line, LONG, timeout_s=None)
        parts = []
        while not (parts and parts[-1].endswith(b"\n")):
            parts.append(os.read(reader, 2**16))
        printed.result()
    assert b"".join(parts) == LONG.encode() + b"\n"


def test_a_name_that_is_not_unicode_is_printed_with_escapes(capfd):
    guard.print_line("no such file: \udcff")
    assert capfd.readouterr().err == "no such file: \\udcff\n"
