"""Arrival times of an open loop."""

from __future__ import annotations

import random
from itertools import accumulate


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return the ascending arrival times of `count` requests, in seconds since the start.

    rate: mean requests per second. burstiness: shape of the gamma distribution of the gaps, whose
    mean is 1 / rate: 1 makes a Poisson process, less is burstier, more is more uniform. The same
    seed gives the same times; another rate scales them.
    """
    draw = random.Random(seed)
    gaps = (draw.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(count))
    return list(accumulate(gaps))
