"""Seconds of a draft model's forward passes by their number of tokens, as measured."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from specdec.types.draft_messages import DraftPass

_NUM_KEPT = 9
"""Passes of one size whose median counts: a pause of the machine is one of them."""

_MAX_AGE = 1000
"""Passes after which a size that none of them had is forgotten, and may be tried again."""

_MAX_GROWTH = 2
"""A pass may have this many times the tokens of the largest one that was measured."""


@dataclass
class _Size:
    """Passes of similar size. last: the number of passes of any size until the last of them."""

    sizes: deque[int] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))
    last: int = 0


class PassTimes:
    """Piecewise linear function of the number of tokens, through medians of recent passes.

    A line is not enough: one token is a product of a matrix and a vector on a CPU, a few take
    another kernel, and a GPU takes equally long for all up to a few hundred.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._num_passes = 0
        self._points: list[tuple[float, float]] | None = None

    def observe(self, each: DraftPass) -> None:
        """Record a pass."""
        self._num_passes += 1
        group = self._sizes.setdefault(_group_of(each.num_tokens), _Size())
        group.sizes.append(each.num_tokens)
        group.seconds.append(each.seconds)
        group.last = self._num_passes
        self._points = None

    @property
    def max_tokens(self) -> int | None:
        """Most tokens that a pass may have; None before the first pass."""
        points = self._known()
        return _MAX_GROWTH * int(points[-1][0]) if points else None

    def seconds(self, num_tokens: int) -> float | None:
        """Return the expected seconds of a pass, never less than of a smaller one.

        None before the first pass. Beyond the sizes that were measured the line through the two
        nearest ones goes on, down to a part in proportion to the tokens.
        """
        points = self._known()
        if not points:
            return None
        if len(points) == 1:
            return points[0][1]
        index = min(max(1, bisect_left(points, (num_tokens, 0.0))), len(points) - 1)
        (low, low_s), (high, high_s) = points[index - 1 : index + 1]
        seconds = low_s + (high_s - low_s) * (num_tokens - low) / (high - low)
        return max(seconds, low_s * min(1.0, num_tokens / low))

    def _known(self) -> Sequence[tuple[float, float]]:
        """Return sizes and seconds, both ascending."""
        if self._points is None:
            oldest = self._num_passes - _MAX_AGE
            self._sizes = {key: each for key, each in self._sizes.items() if each.last > oldest}
            points, least_s = [], 0.0
            for _, group in sorted(self._sizes.items()):
                least_s = max(least_s, median(group.seconds))
                points.append((sum(group.sizes) / len(group.sizes), least_s))
            self._points = points
        return self._points


def _group_of(num_tokens: int) -> int:
    """Return a key, ascending, of passes of one size up to 7 tokens, and of similar ones beyond."""
    exponent = max(0, num_tokens.bit_length() - 3)
    return (exponent << 3) + (num_tokens >> exponent)
