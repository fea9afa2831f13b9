"""Signals of the service's process, once it is ready. Imports neither Ray nor torch."""

from __future__ import annotations

import signal
import threading

from cluster.serve.guard import ABORT, STOP_SIGNALS
from cluster.serve.processes import ToGuard


class Signals:
    """Handler of signals: the first one stops, ABORT or without a guard a second one aborts.

    With a guard, which counts, further signals change nothing: a process manager may have sent the
    same one to every process.
    """

    def __init__(self, to_guard: ToGuard) -> None:
        self.abort = threading.Event()
        self._stop = threading.Event()
        self._to_guard = to_guard

    def wait(self) -> None:
        """Wait for the first signal. Call it after Ray has started, which handles SIGTERM."""
        for number in (*STOP_SIGNALS, ABORT):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, self._receive)
        self._to_guard.ready()
        self._stop.wait()

    def _receive(self, number: int, _: object) -> None:
        is_second = self._stop.is_set() and not self._to_guard.is_guarded
        self._stop.set()
        if is_second or number == ABORT:
            self.abort.set()
