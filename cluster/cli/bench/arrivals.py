"""When the requests of an open loop are due."""

from __future__ import annotations

import random
from itertools import accumulate


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the beginning at which each of `count` requests is due, ascending.

    rate: mean requests a second. burstiness: the shape of the gamma
    distribution of the gaps, whose mean is always 1 / rate: 1 makes them exponential, so that the
    arrivals are a Poisson process; less makes them come in bursts, more evens them out. The same
    seed gives the same times, and at another rate the same ones stretched.
    """
    draw = random.Random(seed)
    gaps = (draw.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(count))
    return list(accumulate(gaps))
