"""A part of the check in a separate process, with a limit of time.

An error of the device, such as an access to an illegal address, makes the CUDA context of its
process useless; a hang would take the time of all other parts. The process is forked, so that it
need not import torch again; so the process that forks must not have initialized CUDA.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from benchmarks.gpu.parts import Context, Part, Result, run_part

_CPU = torch.device("cpu")
_FORK = multiprocessing.get_context("fork")
_LOG_LINES, _LINE_CHARS = 15, 300
_STACK_BEFORE_END_S = 2.0
_THREADS = 2


class ForkedPart:
    """A RunningPart in a forked process, which is stopped after its limit.

    A failed part has the end of its output; one that was stopped or crashed, its stack.
    """

    def __init__(self, part: Part, context: Context, limit_s: float) -> None:
        """Start it."""
        files = Path(mkdtemp(dir=context.directory))
        self._result, self._log, self._stack = (files / each for each in ("json", "log", "stack"))
        self._limit_s, self._began_at_s = limit_s, time.monotonic()
        saving = replace(context, save=self._save)

        def work() -> Result:
            if not part.is_timed:  # others run beside it
                torch.set_num_threads(_THREADS)
            return run_part(part, saving)

        self._process = _FORK.Process(target=self._run, args=(work,))
        self._process.start()

    def poll(self) -> Result | None:
        """See RunningPart."""
        seconds = time.monotonic() - self._began_at_s
        is_over = self._process.is_alive() and seconds > self._limit_s
        if self._process.is_alive() and not is_over:
            return None
        fault = f"stopped after {self._limit_s:.0f} s" if is_over else None
        assert self._process.pid is not None, "the process was started"
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # with the processes that it started
        self._process.kill()
        self._process.join()
        if fault is None and self._process.exitcode:
            fault = f"the process ended with exit code {self._process.exitcode}"
        return self._ended(fault, round(seconds, 1))

    def _ended(self, fault: str | None, seconds: float) -> Result:
        """Return what was saved last, with the fault and the end of the log if there is one."""
        found: Result = {"passed": False, "error": "no result"}
        if self._result.is_file():
            found = json.loads(self._result.read_text(encoding="utf-8"))
        if fault is not None:
            unfinished = found.get("error")
            error = fault if unfinished is None else f"{fault}; {unfinished}"
            found |= {"passed": False, "error": error}
        if not found.get("passed", True):
            found["log"] = _lines(self._log)[-_LOG_LINES:]
            found["stack"] = _lines(self._stack)[:_LOG_LINES]  # the innermost call is first
        return {"seconds": seconds, **found}

    def _save(self, result: Result) -> None:
        """Replace the stored result."""
        new = self._result.with_suffix(".new")
        new.write_text(json.dumps(result), encoding="utf-8")
        new.replace(self._result)

    def _run(self, work: Callable[[], Result]) -> None:
        """Run the part in the forked process; near the limit write its stack."""
        os.setsid()
        with self._log.open("wb", buffering=0) as log:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        stack = self._stack.open("wb")
        faulthandler.enable(stack)
        faulthandler.dump_traceback_later(max(1.0, self._limit_s - _STACK_BEFORE_END_S), file=stack)
        self._save(work())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # without the teardown of libraries


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    return [line[:_LINE_CHARS] for line in text.splitlines()]


def forked(work: Callable[[], Any], directory: Path, limit_s: float = 60.0) -> Any:
    """Return the result of a function, as JSON, from a forked process.

    Raises RuntimeError where it fails.
    """
    part = Part("fork", lambda _: {"value": work()})
    running = ForkedPart(part, Context(_CPU, directory), limit_s)
    while (result := running.poll()) is None:
        time.sleep(0.01)
    if "value" not in result:
        raise RuntimeError(f"{result['error']}: {result.get('log')}")
    return result["value"]
