"""Whether a load is below a threshold, told so that a load around it does not make it flap."""

from __future__ import annotations

import math


class LoadThreshold:
    """Compares the number of decoding requests with a threshold, every step.

    The load is too high when more than `threshold` requests decode, and low again when at most
    `threshold - hysteresis` have for `dwell_s` seconds; a threshold so low that this is none comes
    back at one. So requests that end together, and are followed by as many, are no quiet time. It
    stays low for at least `dwell_s` too.
    """

    def __init__(self, threshold: int, hysteresis: int, dwell_s: float) -> None:
        self._threshold = threshold
        self._hysteresis = hysteresis
        self._dwell_s = dwell_s
        self._num_decoding = 0  # in the last step that had any
        self._is_judged = False  # whether a step was judged by the present threshold
        self._turned_at_s = -math.inf
        self._quiet_since_s = math.inf  # how long the load has been low enough to come back
        self.is_within = True

    def reset(self, threshold: int) -> None:
        """Begins anew with another threshold: the next step is judged by its own load alone."""
        self._threshold = threshold
        self.is_within = self._num_decoding <= threshold
        self._is_judged = False

    def note(self, num_decoding: int) -> None:
        """Takes note of a load while nobody asks for a judgement."""
        self._num_decoding = num_decoding

    def judge(self, num_decoding: int, now_s: float) -> None:
        """Judges a step in which so many decode, 1 or more."""
        self._num_decoding = num_decoding
        is_within = num_decoding <= self._limit()
        self._quiet_since_s = min(self._quiet_since_s, now_s) if is_within else math.inf
        if is_within == self.is_within:
            self._is_judged = True
            return
        since_s = self._quiet_since_s if is_within else self._turned_at_s
        if self._is_judged and now_s - since_s < self._dwell_s:
            return
        self.is_within, self._is_judged, self._turned_at_s = is_within, True, now_s

    def _limit(self) -> int:
        """Most decoding requests with which the load is low after the coming step."""
        if self.is_within or not self._is_judged:
            return self._threshold
        return max(self._threshold - self._hysteresis, min(self._threshold, 1))
