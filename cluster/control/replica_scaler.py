"""Number of replicas over time: additions at once, removals held."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from statistics import mean
from typing import NamedTuple, Self

from cluster.config.objective import Objective
from cluster.control.capacity import CLEAR_S, Capacity, Lengths, capacity, replicas_needed
from specdec.types.reports.service_curve import ServiceCurve
from specdec.types.reports.stats import FAILED, Counts

PERIOD_S = 5.0
"""Least time between two estimates."""

WINDOW_S = 90.0
"""Window of the arrivals."""

LENGTHS_S = 300.0
"""Window of the lengths of requests, which change slowly."""

LEAST_S = 30.0
"""Least window: less would take a few arrivals for a rate, and some of the replicas for all."""

HOLD_S = 360.0
"""Time whose peak is kept. Nothing delays an addition. A number that has not been computed for as
long is unknown."""

MOST_REPLICAS = 1024
"""Bound of the number: reports come from other processes."""

SPARE = 0.4
"""Replicas beyond the peak without which none is removed: noise would add it again."""


class Totals(NamedTuple):
    """Counters of a pool since some moment, those of replicas that have left included.

    num_requests: received, rejected ones too, each choice counted as one. prompt_tokens: those not
    found in the prefix cache, in which queued ones are not looked up yet. output_tokens: generated.
    num_ended: likewise each choice. num_failed: the failed ones of them.
    """

    num_requests: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    num_ended: float = 0.0
    num_failed: float = 0.0

    @classmethod
    def of_counters(
        cls,
        *,
        num_requests: float,
        prompt_tokens: float,
        cached_tokens: float,
        output_tokens: float,
        num_ended: float,
        num_failed: float,
    ) -> Self:
        """Return the totals of metrics."""
        computed = prompt_tokens - cached_tokens
        return cls(num_requests, computed, output_tokens, num_ended, num_failed)

    @classmethod
    def of(cls, counts: Counts) -> Self:
        """Return the totals of a replica."""
        return cls.of_counters(
            num_requests=counts.num_requests,
            prompt_tokens=counts.num_prompt_tokens,
            cached_tokens=counts.num_cached_tokens,
            output_tokens=counts.num_generated_tokens,
            num_ended=sum(counts.ended.values()),
            num_failed=counts.ended.get(FAILED, 0),
        )

    def minus(self, other: Totals) -> Totals:
        """Return the difference."""
        return Totals(*(ours - theirs for ours, theirs in zip(self, other, strict=True)))

    def plus(self, other: Totals) -> Totals:
        """Return the sum."""
        return Totals(*map(sum, zip(self, other, strict=True)))


class _Sample(NamedTuple):
    """A pool at one time. num_open: requests that run or wait."""

    at_s: float
    totals: Totals
    num_open: float

    def since(self, other: _Sample) -> _Sample:
        """Return the differences."""
        return _Sample(
            self.at_s - other.at_s,
            self.totals.minus(other.totals),
            self.num_open - other.num_open,
        )

    @property
    def lengths(self) -> Lengths:
        """Lengths, of differences: prompts count when they are received, outputs as they grow.

        Requests that are open now, more than before, are taken to have half of their output. Failed
        ones are censored, as far as others are half of all: requests that all fail have no length.
        """
        _, totals, num_open = self
        num_complete = totals.num_ended - totals.num_failed
        outputs = max(num_complete + num_open / 2, totals.num_ended / 2)
        prompts = totals.num_ended + num_open
        return Lengths(
            max(0.0, totals.prompt_tokens) / max(1.0, prompts),
            max(0.0, totals.output_tokens) / max(1.0, outputs),
        )


class _Counted(NamedTuple):
    """Counters of a replica, and when they were read."""

    at_s: float
    totals: Totals


class ReplicaScaler:
    """Replicas that a pool needs for an objective. Times are monotonic seconds."""

    def __init__(self, objective: Objective, now_s: float) -> None:
        self._objective = objective
        self._counted: dict[Hashable, _Counted] = {}
        self._num_refused = 0
        self._latest: _Sample | None = None
        self._samples = deque[_Sample]()  # those with recent reports of all replicas
        self._peaks: deque[tuple[float, float]] = deque()  # times and numbers, the highest first
        self._number: int | None = None
        self._known_s = now_s  # when it could last be computed, or the start
        self._served_s = now_s  # when the replicas that are ready last had streams for all requests
        self._least, self._least_until_s = 1, now_s

    def is_due(self, now_s: float) -> bool:
        """Return whether `needed` counts again; until then it returns the last number."""
        return self._latest is None or now_s >= self._latest.at_s + PERIOD_S

    def needed(
        self,
        now_s: float,
        totals: Mapping[Hashable, Totals],
        num_open: float,
        curves: Sequence[ServiceCurve],
        *,
        num_refused: int = 0,
        num_full: int = 0,
        num_starting: int = 0,
        is_stale: bool = False,
    ) -> int | None:
        """Return the number of replicas, from 1 to MOST_REPLICAS; call it every few seconds.

        totals: of each replica that runs, since it started. num_open: requests that run or wait.
        curves: of replicas. num_refused: a counter of requests that reached no replica.
        num_full: replicas whose load is unknown, and at least what one serves. num_starting:
        replicas beside these and those of `totals`; after a start of this process none of them
        is removed for HOLD_S. is_stale: a report is old, so that load may be missing: the number is
        not lowered.

        None: it is unknown, as before the first window, and after HOLD_S without curves or with
        stale reports, from which it begins again.
        """
        if not self.is_due(now_s):
            return self._number
        if now_s > self._known_s + HOLD_S:
            self._samples.clear()
            self._peaks.clear()
            self._number = None
        self._observe(now_s, totals, num_open, num_refused, is_stale)
        if curves and not is_stale:
            self._known_s = now_s
        elif not curves or self._number is None:
            return self._number
        if now_s >= self._samples[0].at_s + LEAST_S:
            number = self._estimate(len(totals), curves) + num_full
            self._set(now_s, number, len(totals) + num_full + num_starting)
        return self._number

    def _set(self, now_s: float, number: float, num_replicas: int) -> None:
        """Set the number from an estimate; the first keeps all replicas for a hold."""
        if self._number is None:
            self._least, self._least_until_s = num_replicas, now_s + HOLD_S
        while self._peaks and self._peaks[-1][1] <= number:
            self._peaks.pop()
        self._peaks.append((now_s, number))
        while self._peaks[0][0] <= now_s - HOLD_S:
            self._peaks.popleft()
        kept = self._number or 1
        if self._known_s == now_s:  # otherwise stale
            kept = min(kept, math.ceil(self._peaks[0][1] + SPARE))
        least = self._least if now_s < self._least_until_s else 1
        self._number = min(MOST_REPLICAS, max(least, math.ceil(number), kept))

    def _observe(
        self,
        now_s: float,
        totals: Mapping[Hashable, Totals],
        num_open: float,
        num_refused: int,
        is_stale: bool,
    ) -> None:
        """Add what was counted since the last call.

        No window begins with stale reports: the next ones count what these lack.
        """
        last = self._latest or _Sample(now_s, Totals(), num_open)
        added, is_other = self._added(now_s, totals)
        if is_other:  # open requests that come or leave with a replica are no arrivals, but ended
            left = last.num_open + added.num_requests - added.num_ended - num_open
            left = min(last.num_open, max(-num_open, left))
            added = added.plus(Totals(num_ended=left))
        added = added.plus(Totals(num_requests=num_refused - self._num_refused))
        self._num_refused = num_refused
        self._latest = _Sample(now_s, last.totals.plus(added), num_open)
        if not is_stale:
            self._samples.append(self._latest)
        while len(self._samples) > 1 and self._samples[1].at_s <= now_s - LENGTHS_S:
            self._samples.popleft()

    def _added(self, now_s: float, totals: Mapping[Hashable, Totals]) -> tuple[Totals, bool]:
        """Return what was counted since the last call, and whether replicas have changed.

        What a replica has counted before its first report may be old, and does not count. One with
        fewer requests than before has started again. One that was away for less than WINDOW_S is
        the same.
        """
        added, last_s = Totals(), now_s if self._latest is None else self._latest.at_s
        present = {name for name, each in self._counted.items() if each.at_s == last_s}
        is_other = present != totals.keys()
        for replica, new in totals.items():
            before = self._counted[replica].totals if replica in self._counted else new
            if new.num_requests < before.num_requests:
                before, is_other = Totals(), True
            added = added.plus(new.minus(before))
        self._counted = {
            name: each for name, each in self._counted.items() if each.at_s > now_s - WINDOW_S
        } | {name: _Counted(now_s, each) for name, each in totals.items()}
        return added, is_other

    def _estimate(self, num_ready: int, curves: Sequence[ServiceCurve]) -> float:
        last, first = self._latest, self._samples[0]
        assert last is not None
        older = (each for each in reversed(self._samples) if each.at_s <= last.at_s - WINDOW_S)
        recent, lengths = last.since(next(older, first)), last.since(first).lengths
        each = [capacity(curve, lengths, self._objective) for curve in curves]
        one = Capacity(
            mean(found.num_streams for found in each), mean(found.requests_per_s for found in each)
        )
        rate = recent.totals.num_requests / recent.at_s
        if self._number is None or last.num_open <= num_ready * one.num_streams:
            self._served_s = last.at_s
        # A backlog that grew while replicas started need not be cleared in less time.
        clear_s = min(HOLD_S, max(CLEAR_S, last.at_s - self._served_s))
        return replicas_needed(rate, last.num_open, num_ready, one, clear_s)
