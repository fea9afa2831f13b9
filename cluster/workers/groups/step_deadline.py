"""Limit of the time for a step's answer, from the times that steps have taken.

A process that is stopped, or swaps, answers no step but does not end either. A limit for the
slowest possible step would let streams wait for a minute; steps of the same size that took
milliseconds before show the fault within seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

MIN_SAMPLES = 8
"""The first steps of a size may compile, allocate or read from disk: they have the full limit."""

_WINDOW = 64


class StepDeadline:
    """Time limits of a group's steps, for each size: the power of two of its number of tokens.

    A limit is `factor` times the last steps of that size, by default the longest, within bounds.
    """

    def __init__(
        self,
        min_s: float,
        max_s: float,
        factor: float,
        of: Callable[[Iterable[float]], float] = max,
        *,
        shares_sizes: bool = False,
    ) -> None:
        """max_s: before a size has MIN_SAMPLES steps, and never exceeded. min_s: the least.

        of: the statistic of the last steps. shares_sizes: whether such a size has the limit of the
        slowest other size, if there is one.
        """
        self._shares_sizes = shares_sizes
        self._min_s = min(min_s, max_s)
        self._max_s = max_s
        self._factor = factor
        self._of = of
        self._seconds: dict[int, deque[float]] = {}  # by size
        self._late: dict[int, list[float]] = {}  # by size, of late steps in a row

    def record(self, num_tokens: int, seconds: float) -> None:
        """Record how long a step of `num_tokens` took to be answered."""
        size = num_tokens.bit_length()
        self._seconds.setdefault(size, deque(maxlen=_WINDOW)).append(seconds)
        self._late.pop(size, None)

    def record_late(self, num_tokens: int, seconds: float) -> None:
        """Record a step whose answer came after its limit.

        MIN_SAMPLES of a size in a row replace its former steps. One counts as at most twice the
        limit: its answer may have arrived before it was read.
        """
        size = num_tokens.bit_length()
        late = self._late.setdefault(size, [])
        late.append(min(seconds, 2 * self.limit_s(num_tokens)))
        if len(late) == MIN_SAMPLES:
            self._seconds[size] = deque(self._late.pop(size), maxlen=_WINDOW)

    def limit_s(self, num_tokens: int) -> float:
        """Return the limit of a step of `num_tokens`, in seconds."""
        typical_s = self._typical_s(num_tokens.bit_length())
        if typical_s is None:
            return self._max_s
        return min(self._max_s, max(self._min_s, self._factor * typical_s))

    def _typical_s(self, size: int) -> float | None:
        """Return the statistic of the last steps of a size; None without enough of them."""
        seconds = self._seconds.get(size, ())
        if len(seconds) >= MIN_SAMPLES:
            return self._of(seconds)
        if not self._shares_sizes:
            return None
        known = (self._of(each) for each in self._seconds.values() if len(each) >= MIN_SAMPLES)
        return max(known, default=None)
