"""The time limit of a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from specdec.types.errors import DeadlineExceededError


@dataclass(frozen=True)
class Deadline:
    """Time limit of a request. timeout_s: the whole limit. at_s: its end, by `time.monotonic`."""

    timeout_s: float
    at_s: float

    @classmethod
    def after(cls, timeout_s: float) -> Deadline:
        """Return the deadline `timeout_s` seconds from now."""
        return cls(timeout_s, time.monotonic() + timeout_s)

    @property
    def remaining_s(self) -> float:
        """Seconds from now; 0 after the deadline."""
        return max(0.0, self.at_s - time.monotonic())

    @property
    def error(self) -> DeadlineExceededError:
        """The error of a request that it ends."""
        return DeadlineExceededError(f"the answer was not complete within {self.timeout_s:g} s")

    def enforce(self) -> TimeLimit:
        """Cancel the body of a `with` at the deadline and raise `error`."""
        return TimeLimit(self.remaining_s, lambda: self.error)


class CancelScope:
    """Context manager of a task whose body `cancel` ends; the context then raises its error.

    It may be entered several times, one after the other.
    """

    _is_entered = False

    def __init__(self, error: Callable[[], Exception]) -> None:
        """error: makes the one to raise."""
        self._error = error

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "not in a task"
        self._task, self._num_cancelled = task, task.cancelling()
        self._is_entered, self._has_cancelled = True, False

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_entered = False  # for a call that is scheduled already
        is_own = self._has_cancelled and self._task.uncancel() <= self._num_cancelled
        if is_own and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise self._error() from None

    def cancel(self, *_: object) -> None:
        """End the body, once, if it runs. Not from the body itself."""
        if self._is_entered and not self._has_cancelled:
            self._has_cancelled = True
            self._task.cancel()


class TimeLimit(CancelScope):
    """Scope that ends after a time, at less than half of the cost of `asyncio.timeout`."""

    def __init__(self, timeout_s: float, error: Callable[[], Exception]) -> None:
        super().__init__(error)
        self._timeout_s = timeout_s

    def __enter__(self) -> None:
        super().__enter__()
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self.cancel)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._timer.cancel()
        super().__exit__(kind)
