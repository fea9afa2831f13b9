"""Lines for a terminal in which a service takes long to start."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Self


class Reminder:
    """Reports that the start continues whenever nothing has been reported for `interval_s`.

    A context manager: its end, or `stop`, ends the reminders; it waits for one that is reported.
    remind: reports reminders, in limited time, where `report` may wait for a reader.
    """

    def __init__(
        self,
        report: Callable[[str], None],
        remind: Callable[[str], None],
        interval_s: float = 8.0,
    ) -> None:
        self._report, self._report_reminder, self._interval_s = report, remind, interval_s
        self._started_at = time.monotonic()
        self._changed, self._has_stopped = threading.Condition(), False
        self._thread = threading.Thread(target=self._remind, name="reminder", daemon=True)

    def __enter__(self) -> Self:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop."""
        self.stop()

    def report(self, line: str) -> None:
        """Report a line, after which the interval begins again."""
        with self._changed:
            self._report(line)
            self._changed.notify()

    def stop(self) -> None:
        """Report no further reminders."""
        with self._changed:
            self._has_stopped = True
            self._changed.notify()

    def _remind(self) -> None:
        with self._changed:
            while not self._has_stopped:
                if not self._changed.wait(self._interval_s) and not self._has_stopped:
                    self._report_reminder(
                        f"  still starting, {time.monotonic() - self._started_at:.0f} s"
                    )
