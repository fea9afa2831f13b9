"""Delays between attempts to start what has failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Backoff:
    """Exponential backoff: no delay after the first failure, then `base_s` doubled up to `limit_s`.

    Running for more than `forget_after_s` seconds resets it; the time that a start takes does not
    count. `clock` is in seconds.
    """

    clock: Callable[[], float]
    base_s: float = 1.0
    limit_s: float = 30.0
    forget_after_s: float = 60.0
    num_failures: int = field(default=0, init=False)
    _started_s: float | None = field(default=None, init=False)

    def started(self) -> None:
        """Record a successful start."""
        self._started_s = self.clock()

    def forgive(self) -> None:
        """Forget the failures so far."""
        self.num_failures = 0

    def delay_s(self) -> float:
        """Record a failure, and return the delay before the next start."""
        if self._started_s is not None and self.clock() - self._started_s > self.forget_after_s:
            self.num_failures = 0
        self._started_s = None
        self.num_failures += 1
        if self.num_failures == 1:
            return 0.0
        exponent = min(self.num_failures - 2, 32)  # far beyond any limit, without overflow
        return min(self.limit_s, self.base_s * 2.0**exponent)
