"""Bursts of requests that a picker routes to simulated replicas.

A picker knows of a replica what it has scraped, each 100 ms, and what it has sent and seen end.
Requests are 20 ms in transit to it.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

from cluster.api.base.prefix_record import PrefixRecord
from cluster.api.base.routing_hint import MAX_OUTPUT_TOKENS, RoutingHint, boundaries
from cluster.api.endpoint_picker.choice import PickRequest
from cluster.api.endpoint_picker.pool import Pick, Pool
from cluster.api.endpoint_picker.reports import EndpointReport
from cluster.config.objective import Objective
from cluster.serve.replica_choice import ReplicaChooser
from tests.cluster.api.endpoint_picker.simulated_replica import (
    ACCEPTANCE,
    CACHE_TOKENS,
    COSTS,
    Replica,
    Request,
)

SCRAPE_S, TRANSIT_S = 0.1, 0.02


class Picker(Protocol):
    """A rule that sends requests to replicas."""

    def choose(self, request: Request) -> int:
        """Return the replica for a request that arrives now."""

    def end(self, index: int, request: Request, now_s: float) -> None:
        """Note the end of a request."""

    def scrape(self, index: int, report: EndpointReport, now_s: float) -> None:
        """Note the gauges of a replica."""


class RoundRobin:
    """Each replica in turn."""

    def __init__(self, number: int) -> None:
        self._number, self._last = number, -1

    def choose(self, request: Request) -> int:
        del request
        self._last = (self._last + 1) % self._number
        return self._last

    def end(self, index: int, request: Request, now_s: float) -> None:
        pass

    def scrape(self, index: int, report: EndpointReport, now_s: float) -> None:
        pass


class QueueAndPrefix(RoundRobin):
    """Scores of queue, KV cache and prefix with weights 2, 2 and 3: the default of llm-d's picker.

    counts_sent: whether requests sent since the scrape count as queued; the reference has that not.
    """

    def __init__(self, number: int, *, counts_sent: bool = False) -> None:
        super().__init__(number)
        self._records = [PrefixRecord(CACHE_TOKENS) for _ in range(number)]
        self._reports: list[EndpointReport | None] = [None] * number
        self._num_sent = [0] * number
        self._counts_sent, self._chance = counts_sent, random.Random(1)

    def scrape(self, index: int, report: EndpointReport, now_s: float) -> None:
        self._reports[index], self._num_sent[index] = report, 0
        self._records[index].limit(report.cache_tokens or CACHE_TOKENS)

    def choose(self, request: Request) -> int:
        found = [each for each in self._reports if each is not None]
        queues = [
            each.num_waiting + sent * self._counts_sent
            for each, sent in zip(found, self._num_sent, strict=True)
        ]
        low, width = min(queues), max(queues) - min(queues)

        def score(index: int) -> float:
            queue = 1 - (queues[index] - low) / width if width else 1.0
            matched = self._records[index].matched_tokens(request.hint)
            prefix = min(1.0, matched / request.hint.prompt_tokens)
            return 2 * queue + 2 * (1 - found[index].kv_cache_usage) + 3 * prefix

        order = self._chance.sample(range(len(found)), len(found))
        index = max(order, key=score)
        self._records[index].add(request.hint)
        self._num_sent[index] += 1
        return index


class ServePrefix(RoundRobin):
    """The rule `prefix` of Serve's proxies, in a single proxy that sees every request."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self._now_s = 0.0
        self._chooser = ReplicaChooser(lambda: self._now_s)
        self._chooser.set_replicas({str(index): CACHE_TOKENS for index in range(number)})

    def choose(self, request: Request) -> int:
        self._now_s = request.at_s
        return int(self._chooser.choose(request.request_id, request.hint))

    def end(self, index: int, request: Request, now_s: float) -> None:
        self._chooser.end(request.request_id)


class ByPool(RoundRobin):
    """The picker's own pool. objective: None to choose by tokens, its default."""

    def __init__(self, number: int, objective: Objective | None) -> None:
        super().__init__(number)
        self._now_s = 0.0
        self._pool = Pool(self._clock, objective=objective)
        self._pool.set_addresses(map(str, range(number)))
        self._picks: dict[str, Pick] = {}

    def _clock(self) -> float:
        return self._now_s

    def scrape(self, index: int, report: EndpointReport, now_s: float) -> None:
        endpoint = self._pool.get(str(index))
        assert endpoint is not None
        endpoint.apply(report, is_ready=True, now_s=now_s)

    def choose(self, request: Request) -> int:
        self._now_s = request.at_s
        pick = self._picks[request.request_id] = self._pool.pick(PickRequest(request.hint))
        return int(pick.endpoint.address)

    def end(self, index: int, request: Request, now_s: float) -> None:
        self._now_s = now_s
        self._picks.pop(request.request_id).end()


class Trace(NamedTuple):
    """Requests of which half continue a conversation.

    bursts: factors of the rate, each 5 s. speed: factor of the rate of the same requests, all of
    whose times are divided by it.
    """

    requests_per_s: float
    seconds: float
    seed: int
    bursts: tuple[float, ...] = (0.4, 0.7, 1.0, 1.9)
    speed: float = 1.0

    def requests(self) -> list[Request]:
        """Return the requests by time."""
        return [
            Request(str(number), at_s / self.speed, *facts)
            for number, (at_s, *facts) in enumerate(_arrivals(self._replace(speed=1.0)))
        ]


@lru_cache(maxsize=16)
def _arrivals(trace: Trace) -> list[tuple[float, RoutingHint, int, int]]:
    """Return times, hints, output tokens and kinds of requests."""
    chance, now_s, burst_until_s, burst = random.Random(trace.seed), 0.0, 0.0, 1.0
    lengths: dict[int, int] = {}  # of conversations
    found: list[tuple[float, RoutingHint, int, int]] = []
    while True:
        now_s += chance.expovariate(trace.requests_per_s * burst)
        if now_s >= trace.seconds:
            return found
        if now_s >= burst_until_s:
            burst = chance.choice(trace.bursts)
            burst_until_s = now_s + chance.expovariate(1 / 5)
        talk = len(found)
        num_prompt_tokens = 50 + int(min(12_000, chance.lognormvariate(6.2, 1.2)))
        if lengths and chance.random() < 0.5:
            talk = chance.choice(list(lengths))
            num_prompt_tokens = lengths.pop(talk) + chance.randrange(20, 200)
        num_output_tokens = 8 + int(min(600, chance.expovariate(1 / 150)))
        if num_prompt_tokens < 14_000:
            lengths[talk] = num_prompt_tokens + num_output_tokens
        kind = talk % len(ACCEPTANCE)
        found.append((now_s, _hint(talk, num_prompt_tokens), num_output_tokens, kind))


def _hint(talk: int, num_prompt_tokens: int) -> RoutingHint:
    """Return the hint of a conversation's prompt; long ones begin with one of 24 documents."""
    shared_bytes = 4800 if num_prompt_tokens > 1400 else 0
    keys = tuple(
        f"{talk % 24 if end <= shared_bytes else 24 + talk}:{end}".encode()
        for end in boundaries(4 * num_prompt_tokens)
    )
    return RoutingHint(keys, num_prompt_tokens, MAX_OUTPUT_TOKENS)


def route(
    make: Callable[[int], Picker],
    costs: Sequence[str],
    trace: Trace,
    cache_tokens: int = CACHE_TOKENS,
) -> list[Request]:
    """Return the requests of a trace after the replicas, one for each cost, have served them."""
    replicas = [Replica(COSTS[name], cache_tokens) for name in costs]
    picker, requests, scraped_s = make(len(replicas)), trace.requests(), -SCRAPE_S
    in_transit = deque[tuple[float, int, Request]]()

    def advance(now_s: float) -> None:
        while in_transit and in_transit[0][0] <= now_s:
            arrives_s, index, request = in_transit.popleft()
            replicas[index].add(request, arrives_s)
        for index, each in enumerate(replicas):
            each.run_until(now_s)
            for request in each.ended:
                picker.end(index, request, now_s)
            each.ended.clear()

    for request in requests:
        while scraped_s + SCRAPE_S <= request.at_s:
            scraped_s += SCRAPE_S
            advance(scraped_s)
            for index, each in enumerate(replicas):
                picker.scrape(index, each.report(scraped_s), scraped_s)
        advance(request.at_s)
        in_transit.append((request.at_s + TRANSIT_S, picker.choose(request), request))
    advance(math.inf)
    return requests
