"""A command that takes the CPU time that no other process wants."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from cluster.serve.guard import STOP_SIGNALS
from cluster.serve.processes import die_with
from specdec.config.hardware import LoadOfOthers

_PERIOD_S = 0.05
"""Time between two measurements of the load."""
_TURN = 12
"""Number of periods under load, of which the process runs in one.

Steps of a stream take 1.02 of their time then; 1.06 with one of seven periods of 0.1 s.
"""
_SPARE_CORES = 0.25
"""They stay idle beside the process where there are enough."""


def run_when_idle(num_threads: int) -> None:
    """Continue in a process that runs when no other one does, on `num_threads` cores.

    It has the policy SCHED_IDLE and leads a session, which has the least share, since Linux shares
    the CPU between sessions first (man 7 sched, autogroup). Even so it would slow others down by
    the memory that it reads in their pauses of a millisecond, so while they use the cores it is
    stopped for eleven periods in twelve.

    The calling process does that, passes signals on, and exits with the other's code; for a signal,
    with that of a shell. Call it with a single thread, since it forks. Outside Linux it only lowers
    the priority.
    """
    if sys.platform != "linux":
        os.nice(19)
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    caller_pid, mask = os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    if pid := os.fork():
        _pass_signals_on(pid)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os._exit(_govern(pid, num_threads))
    os.setsid()
    die_with(caller_pid, signal.SIGKILL)  # which also ends a process that is stopped
    with suppress(OSError):  # a kernel without autogroups, or a container
        Path("/proc/self/autogroup").write_text("19")
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _pass_signals_on(pid: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the child could not be waited for otherwise
    for number in (*STOP_SIGNALS, signal.SIGTSTP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: _pass_on(pid, number))


def _govern(pid: int, num_threads: int) -> int:
    """Stop a child and let it go on until it ends; return the exit code."""
    limit, load, num_periods = _limit(num_threads), LoadOfOthers(psutil.Process(pid)), 0
    while True:
        time.sleep(_PERIOD_S)
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            exit_code = os.waitstatus_to_exitcode(status)
            return exit_code if exit_code >= 0 else 128 - exit_code
        num_periods = num_periods + 1 if load.num_cores() > limit else 0
        os.kill(pid, signal.SIGSTOP if num_periods % _TURN else signal.SIGCONT)


def _limit(num_threads: int) -> float:
    """Return the load of others, in cores, above which the process is stopped."""
    return max(_SPARE_CORES, len(os.sched_getaffinity(0)) - num_threads - _SPARE_CORES)


def _pass_on(pid: int, number: int) -> None:
    """Pass a signal on to a child, which may be stopped. A Ctrl-Z stops this process, too."""
    with suppress(ProcessLookupError):  # it has just ended
        if number == signal.SIGTSTP:
            os.kill(pid, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            os.kill(pid, number)
            os.kill(pid, signal.SIGCONT)
