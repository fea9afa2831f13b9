"""How long to wait before something that failed is started again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Backoff:
    """At once after the first failure, then `base_s`, twice that, and so on up to `limit_s`.

    What has run well for `forget_after_s` seconds starts anew; how long it took to start does not
    count. `clock` is in seconds.
    """

    clock: Callable[[], float]
    base_s: float = 1.0
    limit_s: float = 30.0
    forget_after_s: float = 60.0
    num_failures: int = field(default=0, init=False)
    _started_s: float | None = field(default=None, init=False)

    def started(self) -> None:
        """Takes note that it runs."""
        self._started_s = self.clock()

    def delay_s(self) -> float:
        """Takes note of a failure, and returns how long to wait after it."""
        if self._started_s is not None and self.clock() - self._started_s > self.forget_after_s:
            self.num_failures = 0
        self._started_s = None
        self.num_failures += 1
        if self.num_failures == 1:
            return 0.0
        exponent = min(self.num_failures - 2, 32)  # far past any limit, and no overflow
        return min(self.limit_s, self.base_s * 2.0**exponent)
