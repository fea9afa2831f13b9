"""The processes of `specdec serve`: command, guard and service (Linux).

The command is what the user starts, sees and signals. It forks its guard, which forks the service.
Command and guard then replace themselves by `guard.py`. Guard and service are in a session of their
own, so Ctrl-C in a terminal reaches the command alone.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from cluster.serve import guard
from cluster.serve.guard import (
    ABORT,
    COMMAND,
    COMMAND_ENDED,
    EXIT_LOST,
    GUARD,
    STOP_SIGNALS,
    Command,
    GuardedService,
)

STOP_S = 5.0
"""Seconds for a stop beyond the drain, with a Ray of the service's own."""

JOINED_STOP_S = 50.0
"""The same on an existing cluster, which must delete the applications."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class ToGuard:
    """The service's end of the pipe to its guard. descriptor: None without a guard."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = descriptor

    @property
    def is_guarded(self) -> bool:
        """Return whether signals arrive through a guard: ABORT for the second one."""
        return self._descriptor is not None

    def require(self, processes: Mapping[str, int]) -> None:
        """End the service with a message when one of these processes ends; pids by name."""
        for name, pid in processes.items():
            self._report(f"{guard.VITAL} {name} {pid}")

    def ready(self) -> None:
        """Receive signals from now on; before, one ends the service at once."""
        self._report(guard.READY)

    def ending(self) -> None:
        """Announce that Ray ends, and that nothing else is left to do."""
        self._report(guard.ENDING)

    def done(self) -> None:
        """Announce an exit whose reason is known to the user."""
        self._report(guard.DONE)

    def _report(self, line: str) -> None:
        if self._descriptor is not None:
            with suppress(BrokenPipeError):  # the command ends the service if its guard has ended
                os.write(self._descriptor, f"{line}\n".encode())


@contextmanager
def guarded(drain_timeout_s: float, is_joined: bool) -> Iterator[ToGuard]:
    """Enter the context in another process; the calling one does not return from here.

    Call it with a single thread, since it forks. Not supported outside Linux, where the calling
    process is the service.
    """
    if sys.platform != "linux":
        yield ToGuard()
        return
    stop_s = drain_timeout_s + (JOINED_STOP_S if is_joined else STOP_S)
    to_guard = _fork(stop_s, is_joined)
    try:
        yield to_guard
    finally:
        to_guard.done()


def _fork(stop_s: float, is_joined: bool) -> ToGuard:
    """Return in the service's process."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {*_signals(), ABORT, COMMAND_ENDED})
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # children could not be waited for otherwise
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    command_pid = os.getpid()
    if guard_pid := os.fork():
        _become_command(guard_pid)
    os.setsid()
    guard_pid = os.getpid()
    reports_fd, descriptor = os.pipe()
    if service_pid := os.fork():
        os.close(descriptor)
        _become_guard(GuardedService(service_pid, reports_fd, stop_s, is_joined), command_pid)
    os.close(reports_fd)
    die_with(guard_pid, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    return ToGuard(descriptor)


def _signals() -> Set[signal.Signals]:
    """Return the signals that the command receives; not SIGHUP under nohup."""
    is_immune = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return {*STOP_SIGNALS, signal.SIGCHLD} - ({signal.SIGHUP} if is_immune else set())


def _become_command(guard_pid: int) -> NoReturn:
    """Replace this process, which keeps its words and its name for users who look for them."""
    name = Path("/proc/self/comm").read_text(encoding="utf-8").strip()
    command = Command(guard_pid, [number.value for number in _signals()], name)
    _become(COMMAND, command, *sys.argv)


def _become_guard(service: GuardedService, command_pid: int) -> NoReturn:
    try:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        die_with(command_pid, COMMAND_ENDED)
        os.set_inheritable(service.reports_fd, True)
        _become(GUARD, service)
    finally:
        os._exit(EXIT_LOST)  # the command ends the service


def _become(role: str, state: Command | GuardedService, *words: str) -> NoReturn:
    """Replace this process by guard.py, which sees no variable of the environment."""
    script = str(Path(guard.__file__).resolve())
    arguments = [sys.executable, "-IS", script, role, json.dumps(state), *words]
    os.execve(sys.executable, arguments, {})


def die_with(parent_pid: int, number: signal.Signals) -> None:
    """Receive a signal when the parent ends."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:  # it has ended already
        os.kill(os.getpid(), number)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
