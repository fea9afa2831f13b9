"""A histogram as plain numbers, which replicas report and the fleet adds up."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class HistogramCounts:
    """Observations by bucket.

    bounds: upper ends of the buckets, ascending. counts: [len(bounds) + 1], of each bucket alone;
    the last has what is above all bounds.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.counts) == len(self.bounds) + 1, "a bucket without a count"

    @classmethod
    def empty(cls, bounds: tuple[float, ...]) -> HistogramCounts:
        """Nothing observed."""
        return cls(bounds, (0,) * (len(bounds) + 1))

    def __add__(self, other: HistogramCounts) -> HistogramCounts:
        assert self.bounds == other.bounds, "histograms of different buckets"
        pairs = zip(self.counts, other.counts, strict=True)
        return HistogramCounts(self.bounds, tuple(one + another for one, another in pairs))

    def __sub__(self, before: HistogramCounts) -> HistogramCounts:
        assert self.bounds == before.bounds, "histograms of different buckets"
        pairs = zip(self.counts, before.counts, strict=True)
        return HistogramCounts(self.bounds, tuple(now - then for now, then in pairs))

    def quantile(self, share: float) -> float | None:
        """What `share` of the observations do not exceed; None where there are none.

        Within a bucket observations are taken to lie evenly, and those above all bounds at the
        last one, as Prometheus' histogram_quantile does it.
        """
        ends = list(accumulate(self.counts))
        if ends[-1] == 0:
            return None
        rank = share * ends[-1]
        index = bisect_left(ends, rank)
        if index >= len(self.bounds):
            return self.bounds[-1]
        low = self.bounds[index - 1] if index else 0.0
        begin = ends[index - 1] if index else 0
        inside = self.counts[index]
        return low + (self.bounds[index] - low) * ((rank - begin) / inside if inside else 1.0)
