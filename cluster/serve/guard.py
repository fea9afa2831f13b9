"""The guard of a service, between the `specdec serve` command and the service, and that command.

The guard stops the service on a signal, reports why it ended, and kills every process that is left.
The kernel hands it the orphans among its descendants (PR_SET_CHILD_SUBREAPER), so none escapes. The
command passes signals on to the guard, and does its work if the guard is killed.

Both run this file as a script, on the standard library alone: they need few megabytes, and
`pkill -f "specdec serve"` does not match the guard. See docs/adr/0024-guarded-processes.md.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

EXIT_LOST = 70
"""Exit code when the service or its Ray ended by itself; EX_SOFTWARE of sysexits.h."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ABORT = signal.SIGUSR2  # from the command to the guard, and from the guard to the service
COMMAND_ENDED = signal.SIGUSR1  # from the kernel to the guard

# What the service writes into the pipe to its guard: one word and its arguments per line.
VITAL = "vital"  # NAME PID: the service cannot go on without this process
READY = "ready"  # it has handlers for SIGTERM and ABORT
ENDING = "ending"  # nothing is left to do but to end Ray
DONE = "done"  # its output gives the reason of its exit code

_ABORT_S = 5.0
_SETTLE_S = 0.3  # in which the signal that ended another process arrives here, too
_KILL_TIMEOUT_S = 10.0


COMMAND, GUARD = "command", "guard"
"""The roles of this script: its first argument."""


class Command(NamedTuple):
    """The command, once it has started: the signals that it passes on, and its process name."""

    guard_pid: int
    signals: Sequence[int]
    name: str


class GuardedService(NamedTuple):
    """A service as its guard knows it.

    reports_fd: the pipe from the service. stop_s: seconds from a stop signal to a kill. is_joined:
    it runs on an existing Ray cluster, from which it removes its applications also when its start
    is interrupted.
    """

    pid: int
    reports_fd: int
    stop_s: float
    is_joined: bool


class Outcome(NamedTuple):
    """The end of a service: the exit code, and a line for standard error unless it is empty."""

    exit_code: int
    line: str = ""


class Guard:
    """Follows a service until it ends or is killed."""

    def __init__(self, service: GuardedService) -> None:
        """Receive the signals that have been blocked so far."""
        self._service = service
        self._status: int | None = None  # as waitpid returns it; None while the service runs
        self._stop_signal: signal.Signals | None = None
        self._failure = ""
        self._was_ready = self._is_ending = self._is_done = False
        self._deadline_s = math.inf
        self._unread = b""
        self._vital: dict[int, str] = {}  # names of processes by pidfd
        self._poller = select.poll()
        self._signals_fd = _receive_signals()
        os.set_blocking(service.reports_fd, False)
        self._poller.register(self._signals_fd, select.POLLIN)
        self._poller.register(service.reports_fd, select.POLLIN)

    def run(self) -> int:
        """Return the exit code when no process of the service is left."""
        while self._status is None and time.monotonic() < self._deadline_s:
            self._handle_events()
        outcome = self._outcome()
        end_descendants()
        if outcome.line:
            print_line(outcome.line)
        return outcome.exit_code

    def _handle_events(self) -> None:
        left_s = self._deadline_s - time.monotonic()
        ready = self._poller.poll(None if left_s == math.inf else max(0.0, left_s) * 1000)
        self._read_reports()  # first: they explain the other events
        for number in sorted(_read(self._signals_fd), key=lambda number: number == ABORT):
            self._on_signal(signal.Signals(number))  # ABORT last, if it came with the first signal
        for descriptor, event in ready:
            if descriptor in self._vital:
                self._fail(f"Ray's {self._vital[descriptor]} has ended")
            elif descriptor == self._service.reports_fd and event & select.POLLHUP:
                self._poller.unregister(descriptor)  # the service has ended
        self._reap()

    def _read_reports(self) -> None:
        *lines, self._unread = (self._unread + _read(self._service.reports_fd)).split(b"\n")
        for line in lines:
            self._on_report(*line.decode().split())

    def _on_report(self, word: str, *arguments: str) -> None:
        if word == VITAL:
            self._watch(arguments[0], int(arguments[1]))
        elif word == READY:
            self._was_ready = True
        else:
            self._is_ending = True
            self._is_done = word == DONE
            if self._stop_signal is not None and not self._service.is_joined:
                self._end_within(0.0)  # faster than Ray, and quieter
            for descriptor in self._vital:
                self._poller.unregister(descriptor)
            self._vital = {}

    def _watch(self, name: str, pid: int) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._fail(f"Ray's {name} (process {pid}) has ended")
        except OSError:
            return  # Linux before 5.3: the service itself notices, later
        else:
            self._vital[descriptor] = f"{name} (process {pid})"
            self._poller.register(descriptor, select.POLLIN)

    def _on_signal(self, number: signal.Signals) -> None:
        if number == ABORT:
            self._abort()
        elif number == COMMAND_ENDED and not self._service.is_joined:
            self._fail("the command was killed")
        elif number != signal.SIGCHLD:
            self._stop(signal.SIGTERM if number == COMMAND_ENDED else number)

    def _stop(self, number: signal.Signals) -> None:
        """Pass the first signal on to a service that can handle it; else end it at once."""
        if self._stop_signal is not None:
            return
        self._stop_signal = number
        if self._was_ready:
            self._send(signal.SIGTERM)
        elif self._service.is_joined:
            self._send(signal.SIGINT)  # a KeyboardInterrupt
        self._end_within(self._service.stop_s if self._is_stoppable else 0.0)

    def _abort(self) -> None:
        if self._was_ready:
            self._send(ABORT)
        if not (self._was_ready and self._service.is_joined):
            self._end_within(_ABORT_S if self._was_ready else 0.0)

    @property
    def _is_stoppable(self) -> bool:
        return self._was_ready or self._service.is_joined

    def _send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._service.pid, number)

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._end_within(_SETTLE_S)

    def _end_within(self, limit_s: float) -> None:
        self._deadline_s = min(self._deadline_s, time.monotonic() + limit_s)

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == self._service.pid:
                    self._status = found[1]
        if self._status is not None:
            self._read_reports()  # the last ones

    def _outcome(self) -> Outcome:
        if self._stop_signal is not None:
            return self._outcome_of_stop(self._stop_signal)
        exit_code = 0 if self._status is None else os.waitstatus_to_exitcode(self._status)
        if self._failure and exit_code >= 0:  # a service that is killed takes Ray with it
            return Outcome(EXIT_LOST, f"error: {self._failure}, so the service has ended")
        if self._is_done and exit_code >= 0:
            return Outcome(exit_code)
        return _outcome_of_loss(exit_code)

    def _outcome_of_stop(self, number: signal.Signals) -> Outcome:
        exit_code = 128 + number
        if self._failure:
            return Outcome(exit_code, f"{self._failure} while the service stopped")
        if self._was_ready:
            if self._is_ending:
                return Outcome(0)
            line = f"the service did not stop within {self._service.stop_s:g} s and was killed"
            return Outcome(exit_code, line)
        return Outcome(exit_code, f"stopped by {number.name} before the service was ready")


def _outcome_of_loss(exit_code: int) -> Outcome:
    """exit_code: of a service that has not reported its end; negative for a signal."""
    name = signal.Signals(-exit_code).name if exit_code < 0 else ""
    if -exit_code in STOP_SIGNALS:
        return Outcome(128 - exit_code, f"the service was ended by {name}")
    how = f"was killed by {name}" if name else f"ended with code {exit_code}, without a reason"
    return Outcome(EXIT_LOST, f"error: the service process {how}")


def _receive_signals() -> int:
    """Unblock the guard's signals; return a descriptor from which their numbers are read."""
    numbers = {*STOP_SIGNALS, ABORT, COMMAND_ENDED, signal.SIGCHLD}
    reading, writing = os.pipe()
    for each in (reading, writing):
        os.set_blocking(each, False)
    signal.set_wakeup_fd(writing)
    for number in numbers:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    return reading


def _read(descriptor: int) -> bytes:
    """Return what has arrived; nothing at the end of the file."""
    with suppress(BlockingIOError):
        return os.read(descriptor, 4096)
    return b""


def end_descendants() -> None:
    """Kill and reap all descendants of this process, which is a subreaper."""
    deadline_s = time.monotonic() + _KILL_TIMEOUT_S
    while time.monotonic() < deadline_s:
        for pid in _descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return  # as every orphan becomes a child, no process is left
        time.sleep(0.01)
    print_line(f"warning: processes cannot be killed: {sorted(_descendants(os.getpid()))}")


def _descendants(ancestor: int) -> set[int]:
    children = defaultdict(list)
    for each in Path("/proc").iterdir():
        with suppress(OSError):
            if each.name.isdigit():
                stat = (each / "stat").read_text(encoding="utf-8", errors="replace")
                children[int(stat.rpartition(")")[2].split()[1])].append(int(each.name))
    found: set[int] = set()
    pending = [ancestor]
    while pending:
        pending += (new := children[pending.pop()])
        found.update(new)
    return found


def print_line(line: str, timeout_s: float | None = 1.0) -> None:
    """Print to standard error, unless the terminal or the pipe is closed.

    What remains is left out if nothing can be written for timeout_s; without one, it waits.
    """
    rest = f"{line}\n".encode(errors="backslashreplace")
    with suppress(OSError):
        while rest and select.select((), (2,), (), timeout_s)[1]:
            rest = rest[os.write(2, rest[: select.PIPE_BUF]) :]  # a larger write may block


def follow(command: Command) -> int:
    """Pass signals on to the guard until it ends; return the exit code.

    A second SIGINT or SIGTERM aborts. Of SIGHUP, a closed terminal may send several.
    """
    is_stopping = False
    while True:
        number = signal.sigwaitinfo(command.signals).si_signo
        if number != signal.SIGCHLD:
            is_second = is_stopping and number != signal.SIGHUP
            os.kill(command.guard_pid, ABORT if is_second else number)
            is_stopping = True
            continue
        pid, status = os.waitpid(command.guard_pid, os.WNOHANG)
        if pid:
            break
    end_descendants()  # none is left, unless the guard itself was killed
    exit_code = os.waitstatus_to_exitcode(status)
    if exit_code >= 0:
        return exit_code
    print_line(f"error: the guard process {pid} was killed, so the service has ended")
    return EXIT_LOST


def main(role: str, state: str) -> int:
    """Run as the command or the guard with its state as JSON; return the exit code."""
    if role == GUARD:
        return Guard(GuardedService(*json.loads(state))).run()
    command = Command(*json.loads(state))
    Path("/proc/self/comm").write_text(command.name, encoding="utf-8")
    return follow(command)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
