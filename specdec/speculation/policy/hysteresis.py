"""Threshold with hysteresis on the number of decoding requests."""

from __future__ import annotations

import math

from specdec.types.control import MAX_SPECULATION_THRESHOLD, require_count
from specdec.types.errors import InvalidValueError


class LoadHysteresis:
    """Threshold with hysteresis and dwell time, updated in every step.

    The load is too high as soon as more than `threshold` requests decode. It is low again when at
    most `threshold - hysteresis`, but no fewer than one, have decoded for `dwell_s` seconds. It
    then stays low for at least `dwell_s`. Thus a batch that ends and is followed by the next does
    not count as low load.
    """

    def __init__(self, threshold: int, hysteresis: int, dwell_s: float) -> None:
        """Raise InvalidValueError for a number of requests or seconds that is not possible."""
        require_count("hysteresis", hysteresis, MAX_SPECULATION_THRESHOLD)
        if not 0 <= dwell_s < math.inf:
            raise InvalidValueError("dwell_s", dwell_s, "a number of seconds, 0 or more")
        self._threshold = threshold
        self._hysteresis = hysteresis
        self._dwell_s = dwell_s
        self._num_decoding = 0  # in the last step that had any
        self._is_settled = False  # whether a step was compared with the present threshold
        self._changed_at_s = -math.inf
        self._low_since_s = math.inf  # since when the load is low enough to return
        self.is_within = True

    def reset(self, threshold: int) -> None:
        """Change the threshold: the next step is compared without dwell time."""
        self._threshold = threshold
        self.is_within = self._num_decoding <= threshold
        self._is_settled = False

    def note(self, num_decoding: int) -> None:
        """Record a load in a step that does not depend on the threshold."""
        self._num_decoding = num_decoding

    def update(self, num_decoding: int, now_s: float) -> None:
        """Compare the load of a step; `num_decoding` is 1 or more."""
        self._num_decoding = num_decoding
        is_within = num_decoding <= self._limit()
        self._low_since_s = min(self._low_since_s, now_s) if is_within else math.inf
        if is_within == self.is_within:
            self._is_settled = True
            return
        since_s = self._low_since_s if is_within else self._changed_at_s
        if self._is_settled and now_s - since_s < self._dwell_s:
            return
        self.is_within, self._is_settled, self._changed_at_s = is_within, True, now_s

    def _limit(self) -> int:
        """Most decoding requests at which the load is low after the next step."""
        if self.is_within or not self._is_settled:
            return self._threshold
        return max(self._threshold - self._hysteresis, min(self._threshold, 1))
