"""Contender in its own process, where its idle threads cannot slow another one."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import num_usable_cores
from benchmarks.workloads import Measurement, Workload

_STOP_TIMEOUT_S = 10.0


class Worker:
    """Proxy of a contender in another process, which sleeps between calls. A context manager."""

    def __init__(self, factory: Callable[[Path], Any], directory: Path) -> None:
        """Start the process. `factory` makes the contender from a model directory; picklable."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_work, args=(factory, directory, theirs), daemon=True
        )
        self._process.start()
        theirs.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()
        self._process.join(_STOP_TIMEOUT_S)

    def measure(self, workload: Workload) -> Measurement:
        """Run a workload once, in the other process."""
        measurement: Measurement = self.call("measure", workload)
        return measurement

    def call(self, method: str, workload: Workload) -> Any:
        """Call any method of the contender. Raises EOFError if the other process has died."""
        self._connection.send((method, workload))
        return self._connection.recv()


def _work(factory: Callable[[Path], Any], directory: Path, connection: Connection) -> None:
    torch.set_num_threads(num_usable_cores())
    contender = factory(directory)
    while True:
        try:
            method, workload = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return  # the parent closed the connection
        connection.send(getattr(contender, method)(workload))
