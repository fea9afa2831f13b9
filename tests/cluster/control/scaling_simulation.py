"""Simulated days of a pool whose replicas Kubernetes' HPA sets to the number that is needed.

Replicas run as fluids: prompts one after the other, and streams that share the rate of their number
meanwhile, or have a token for each chunk of a prompt.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from cluster.config.objective import Objective
from cluster.control.replica_scaler import ReplicaScaler, Totals
from specdec.types.reports.service_curve import ServiceCurve

OBJECTIVE = Objective(2.0, 0.04)
CURVE = ServiceCurve(
    (1, 2, 4, 8, 16, 32, 64), (173.7, 171.5, 167.3, 159.5, 146.8, 104.2, 67.6), 4895.0
)
"""Drafts of 3, 3, 3, 3, 2, 1 and 0 tokens: steps take 10 ms for the weights, 0.2 ms a row and 0.8
ms a draft token, and 0.625, 0.575, 0.55 of the drafts are accepted."""
CHUNK_TOKENS = 512
DAY_S, OBSERVED_S, SYNC_S, START_S, MOST_MISSED = 86_400.0, 5, 15, 60, 0.03
HPA_TOLERANCE = 0.1
"""Kubernetes' default: smaller changes of the number of replicas are not made."""
PROMPT_TOKENS, OUTPUT_TOKENS = 1500, 600  # on average, both exponential

Rate = Callable[[float], float]
"""Requests per second at a time of the day."""


class Request(NamedTuple):
    """A request. end: tokens of each stream of its replica when it ends. first_s: of its token."""

    end: float
    at_s: float
    prompt_s: float
    num_tokens: int
    first_s: float = 0.0

    def is_within(self, ended_s: float) -> bool:
        """Return whether it was within the objective."""
        is_fast = ended_s - self.first_s <= OBJECTIVE.output_token_s * (self.num_tokens - 1)
        return is_fast and self.first_s - self.at_s <= OBJECTIVE.first_token_s


@dataclass(eq=False)
class Replica:
    """A replica with its counters. tokens: those of a stream that runs since the start."""

    now_s: float
    tokens: float = 0.0
    prompts: deque[Request] = field(default_factory=deque)
    prompt_left_s: float = 0.0
    running: list[Request] = field(default_factory=list)
    num_ended: int = 0
    num_within: int = 0
    num_tokens: int = 0

    def add(self, request: Request) -> None:
        """Queue a request that arrives now."""
        self.prompts.append(request)
        if len(self.prompts) == 1:
            self.prompt_left_s = request.prompt_s

    @property
    def num_open(self) -> int:
        return len(self.prompts) + len(self.running)

    def run_until(self, now_s: float) -> None:
        """Advance to a time."""
        while self.now_s < now_s and (self.prompts or self.running):
            speed = CURVE.prompt_tokens_per_s / CHUNK_TOKENS
            if not self.prompts:
                speed = 1 / TOKEN_S[min(len(self.running), len(TOKEN_S) - 1)]
            end_s = (self.running[0].end - self.tokens) / speed if self.running else math.inf
            prompt_s = self.prompt_left_s if self.prompts else math.inf
            spent_s = max(0.0, min(end_s, prompt_s, now_s - self.now_s))
            self.now_s, self.tokens = self.now_s + spent_s, self.tokens + speed * spent_s
            self.prompt_left_s -= spent_s
            if spent_s == end_s:
                self._end(heapq.heappop(self.running))
            elif spent_s == prompt_s:
                self._begin(self.prompts.popleft())
        self.now_s = now_s

    def _begin(self, request: Request) -> None:
        end = self.tokens + request.num_tokens - 1
        heapq.heappush(self.running, request._replace(first_s=self.now_s, end=end))
        self.prompt_left_s = self.prompts[0].prompt_s if self.prompts else 0.0

    def _end(self, request: Request) -> None:
        self.num_ended, self.num_tokens = self.num_ended + 1, self.num_tokens + request.num_tokens
        self.num_within += request.is_within(self.now_s)


TOKEN_S = [CURVE.token_s(number) for number in range(1000)]


def arrivals(rate: Rate, seconds: float, seed: int) -> Iterator[Request]:
    """Yield the requests of a Poisson process."""
    most = 1.05 * max(rate(at_s) for at_s in range(0, math.ceil(seconds), 15))
    chance, now_s = random.Random(seed), 0.0
    while (now_s := now_s + chance.expovariate(most)) < seconds:
        if chance.random() * most <= rate(now_s):
            prompt_s = chance.expovariate(CURVE.prompt_tokens_per_s / PROMPT_TOKENS)
            yield Request(0.0, now_s, prompt_s, 2 + int(chance.expovariate(1 / OUTPUT_TOKENS)))


def send(request: Request, replicas: Sequence[Replica], chance: random.Random) -> None:
    """Send a request to the one of three replicas with the fewest prompts and open requests."""
    candidates = chance.sample(replicas, min(3, len(replicas)))
    for each in candidates:
        each.run_until(request.at_s)
    min(candidates, key=lambda each: (len(each.prompts), each.num_open)).add(request)


def missed_share(num_replicas: int, requests_per_s: float) -> float:
    """Return the share of requests outside the objective at a steady rate, three runs together."""
    num_within = num_ended = 0
    for seed in (1, 2, 3):
        seconds = 7200.0 / num_replicas**0.8
        chance, replicas = random.Random(10 + seed), [Replica(0.0) for _ in range(num_replicas)]
        for request in arrivals(lambda _: requests_per_s, seconds, seed):
            send(request, replicas, chance)
        for each in replicas:
            each.run_until(2 * seconds)
            num_within, num_ended = num_within + each.num_within, num_ended + each.num_ended
    return 1 - num_within / num_ended


ORACLE_RATES = (
    (1, 1.16),
    (2, 1.68),
    (3, 1.88),
    (4, 1.94),
    (6, 2.01),
    (8, 2.05),
    (12, 2.09),
    (16, 2.11),
)
"""Numbers of replicas, and the largest requests per second of each with which the fleet misses at
most 3 %, by `missed_share`."""


def replicas_by_oracle(requests_per_s: float) -> int:
    """Return the fewest replicas for a rate that is known, by their steady simulation."""
    number = 1
    while number * _oracle_rate(number) < requests_per_s:
        number += 1
    return number


def _oracle_rate(number: int) -> float:
    for (low, low_rate), (high, high_rate) in pairwise(ORACLE_RATES):
        if number <= high:
            return low_rate + (high_rate - low_rate) * (number - low) / (high - low)
    return ORACLE_RATES[-1][1]


@dataclass(frozen=True)
class DayResult:
    """missed: share of the requests outside the objective. hours: replica hours over those of the
    oracle. apart_s: least time between two changes of the direction; infinite below two."""

    missed: float
    hours: float
    apart_s: float


class Day:
    """A pool whose replicas take `start_s` to start."""

    def __init__(
        self, rate: Rate, seed: int, start_s: float = START_S, failing: float = 0.0
    ) -> None:
        """failing: share of the requests that end in an error, at their last token."""
        self._rate, self._seed, self._start_s, self._failing = rate, seed, start_s, failing
        self._chance = random.Random(seed)
        self._scaler = ReplicaScaler(OBJECTIVE, 0.0)
        self._running = [Replica(0.0) for _ in range(replicas_by_oracle(rate(0.0)))]
        self._starting: list[float] = []  # when each is ready
        self._stopped: list[Replica] = []
        self._totals = Totals()
        self._first = len(self._running)
        self.targets: list[int] = []
        self.needed: list[int] = []

    def run(self, seconds: float = DAY_S) -> DayResult:
        """Run for a time."""
        observed_s = 0.0
        for request in arrivals(self._rate, seconds, self._seed):
            while observed_s <= request.at_s:
                self._observe(observed_s)
                observed_s += OBSERVED_S
            prompt_tokens = request.prompt_s * CURVE.prompt_tokens_per_s
            self._totals = self._totals.plus(Totals(1, prompt_tokens))
            send(request, self._running, self._chance)
        replicas = [*self._running, *self._stopped]
        for each in replicas:
            each.run_until(seconds + 900)
        within, ended = (
            sum(getattr(r, name) for r in replicas) for name in ("num_within", "num_ended")
        )
        return DayResult(1 - within / ended, sum(self.targets) / sum(self.needed), self._apart_s())

    def _observe(self, now_s: float) -> None:
        replicas = [*self._running, *self._stopped]
        for each in replicas:
            each.run_until(now_s)
        num_ended = sum(each.num_ended for each in replicas)
        num_tokens = sum(each.num_tokens for each in replicas)
        ended = Totals(*self._totals[:2], num_tokens, num_ended, self._failing * num_ended)
        num_open = sum(each.num_open for each in replicas)
        curves = [CURVE] * len(self._running)
        totals = {self: ended, **dict.fromkeys(range(1, len(self._running)), Totals())}
        number = self._scaler.needed(now_s, totals, num_open, curves) or self._first
        if now_s % SYNC_S == 0:
            self._sync(number, now_s)

    def _sync(self, number: int, now_s: float) -> None:
        ready = [at_s for at_s in self._starting if at_s <= now_s]
        self._running += [Replica(now_s) for _ in ready]
        self._starting = self._starting[len(ready) :]
        current = len(self._running) + len(self._starting)
        if abs(number / current - 1) > HPA_TOLERANCE:
            self._scale_to(number, now_s)
            current = number
        self.targets.append(current)
        self.needed.append(replicas_by_oracle(self._rate(now_s)))

    def _scale_to(self, target: int, now_s: float) -> None:
        while len(self._running) + len(self._starting) < target:
            self._starting.append(now_s + self._start_s)
        while len(self._running) + len(self._starting) > target:
            if self._starting:
                self._starting.pop()
            else:
                self._stopped.append(self._running.pop())

    def _apart_s(self) -> float:
        changes = [
            (index * SYNC_S, after - before)
            for index, (before, after) in enumerate(pairwise(self.targets))
            if after != before
        ]
        turns = [at_s for (_, old), (at_s, new) in pairwise(changes) if old * new < 0]
        return min((b - a for a, b in pairwise(turns)), default=math.inf)


class Burst(NamedTuple):
    """A burst that adds `height` times the load of the day, with linear edges."""

    at_s: float
    height: float
    lasts_s: float = 1500.0
    ramp_s: float = 180.0

    def share(self, now_s: float) -> float:
        """Return the part of its height at a time."""
        edges = (now_s - self.at_s, self.at_s + self.lasts_s - now_s)
        return max(0.0, min(1.0, *(each / self.ramp_s for each in edges)))


def day(mean: float, swing: float, bursts: Sequence[Burst] = (), drift: float = 0.0) -> Rate:
    """Return a rate that is lowest at midnight. drift: what it gains in a day."""

    def rate(now_s: float) -> float:
        daily = mean - swing * math.cos(2 * math.pi * now_s / DAY_S) + drift * now_s / DAY_S
        return daily * (1 + sum(each.height * each.share(now_s) for each in bursts))

    return rate


TUNED_ON: Mapping[str, Rate] = {
    "single burst": day(8, 5, [Burst(50_000, 1.5, 3600.0, 120.0)]),
    "weekend": day(3, 1.5, [Burst(40_000, 0.5)]),
    "slow ramp": day(3, 0, drift=15),
}
"""Days on which the constants of the scaler were chosen."""

TWO_BURSTS = day(9, 6, [Burst(30_000, 1.0), Burst(62_000, 1.0)])


def random_day(seed: int) -> Rate:
    """Return a day of other mean, swing and bursts."""
    chance = random.Random(seed)
    bursts = [
        Burst(
            chance.uniform(0.05, 0.9) * DAY_S,
            chance.uniform(0.3, 1.5),
            chance.uniform(600, 5400),
            chance.uniform(60, 600),
        )
        for _ in range(chance.randrange(5))
    ]
    mean = chance.uniform(3, 14)
    return day(mean, chance.uniform(0, 0.7) * mean, bursts)
