"""Simulated replicas with prompts, caches and drafts, and bursts of requests that a picker routes.

A picker knows of a replica what it has scraped, each 100 ms, and what it has sent and seen end.
Requests are 20 ms in transit to it.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple, Protocol

from cluster.api.base.prefix_record import PrefixRecord
from cluster.api.base.routing_hint import MAX_OUTPUT_TOKENS, RoutingHint, boundaries
from cluster.api.endpoint_picker.choice import PickRequest
from cluster.api.endpoint_picker.pool import Pick, Pool
from cluster.api.endpoint_picker.reports import EndpointReport
from cluster.config.objective import Objective
from cluster.serve.replica_choice import ReplicaChooser
from specdec.types.reports.service_curve import ServiceCurve
from tests.specdec.speculation.policy.synthetic_service import CostCurve, expected_accepted

COSTS = {
    "fast": CostCurve(weights_s=0.010, row_s=0.00005, draft_s=0.0008),
    "slow": CostCurve(weights_s=0.010, row_s=0.0002, draft_s=0.0008),
}
ACCEPTANCE = ((0.85, 0.8, 0.8, 0.75, 0.7), (0.6, 0.5, 0.5, 0.45, 0.4), (0.2, 0.2, 0.1, 0.1, 0.1))
"""Rates by position, for each kind of conversation."""

CACHE_TOKENS, MAX_NUM_SEQS, CHUNK_TOKENS = 200_000, 64, 512
SCRAPE_S, TRANSIT_S = 0.1, 0.02
_LENGTHS = range(6)
_SIZES = (1, 2, 4, 8, 16, 32, MAX_NUM_SEQS)


@dataclass(eq=False)
class Request:
    """A request that arrives at `at_s`. acceptance: of its drafts by position."""

    request_id: str
    at_s: float
    hint: RoutingHint
    num_output_tokens: int
    acceptance: tuple[float, ...]
    prompt_left: int = 0
    output_left: float = 0.0
    first_at_s: float = math.inf
    ended_at_s: float = math.inf

    @property
    def kv_tokens(self) -> int:
        """Return the tokens of the KV cache that are reserved for it."""
        return self.hint.prompt_tokens + self.num_output_tokens

    def meets(self, objective: Objective) -> bool:
        """Return whether its latencies were within the objective."""
        decode_s = self.ended_at_s - self.first_at_s
        is_fast = decode_s <= objective.output_token_s * (self.num_output_tokens - 1)
        return is_fast and self.first_at_s - self.at_s <= objective.first_token_s


@dataclass(eq=False)
class Replica:
    """Steps of continuous batching with chunked prompts, on a separate clock.

    cache_tokens: capacity of the KV cache, where running requests have their tokens reserved.
    Steps with a part of a prompt have no drafts; others have those of the highest goodput.
    """

    name: str
    costs: CostCurve
    cache_tokens: int = CACHE_TOKENS
    now_s: float = 0.0
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    cache: PrefixRecord = field(init=False)
    ended: list[Request] = field(default_factory=list)  # since they were last collected
    num_ended: int = 0
    num_tokens: int = 0

    def __post_init__(self) -> None:
        self.cache = PrefixRecord(self.cache_tokens)

    def run_until(self, now_s: float) -> None:
        """Run steps until a time."""
        while self.now_s < now_s and (self.waiting or self.running):
            self._step()
        self.now_s = max(self.now_s, now_s)

    def report(self) -> EndpointReport:
        """Return the gauges of this moment."""
        num_decoding = sum(not each.prompt_left for each in self.running)
        mean = self.num_tokens / self.num_ended if self.num_ended else None
        return EndpointReport(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            kv_cache_usage=min(1.0, self._num_reserved / self.cache_tokens),
            cache_tokens=self.cache_tokens,
            num_decoding=num_decoding,
            curve=curve_of(self.costs, self._acceptance()),
            output_tokens=mean,
        )

    @property
    def _num_reserved(self) -> int:
        return sum(each.kv_tokens for each in self.running)

    def _may_run_another(self) -> bool:
        """Return whether the oldest waiting request has a seat; one that runs alone always has."""
        if not self.waiting or len(self.running) == MAX_NUM_SEQS:
            return False
        num_tokens = self._num_reserved + self.waiting[0].kv_tokens
        return not self.running or num_tokens <= self.cache_tokens

    def _acceptance(self) -> tuple[float, ...]:
        """Return the mean of those that run, which an engine observes."""
        rows = [each.acceptance for each in self.running] or ACCEPTANCE
        return tuple(round(sum(each) / len(rows), 1) for each in zip(*rows, strict=True))

    def _step(self) -> None:
        decoding = [each for each in self.running if not each.prompt_left]
        begun, num_prompt_tokens = self._take_prompts()
        count = 0
        if decoding and not num_prompt_tokens:
            count = best_length(self.costs, len(decoding), self._acceptance())
        num_rows = len(decoding) * count + num_prompt_tokens
        self.now_s += self.costs.step_s(len(decoding), count, num_rows=num_rows)
        for each in decoding:
            each.output_left -= 1 + accepted(each.acceptance, count)
        for each in begun:
            each.first_at_s, each.output_left = self.now_s, each.num_output_tokens - 1
            self.cache.add(each.hint)
        for each in decoding:
            if each.output_left <= 0:
                each.ended_at_s = self.now_s
                self.ended.append(each)
                self.num_ended += 1
                self.num_tokens += each.num_output_tokens
        self.running = [each for each in self.running if each.ended_at_s == math.inf]

    def _take_prompts(self) -> tuple[list[Request], int]:
        """Compute a chunk of prompts; return the requests whose prompts end, and its tokens.

        A request runs from the step on that has room for its first prompt token.
        """
        begun, num_left, taken = (
            [],
            CHUNK_TOKENS,
            [each for each in self.running if each.prompt_left],
        )
        while num_left:
            if not taken:
                if not self._may_run_another():
                    break
                taken = [self.waiting.popleft()]
                num_cached = self.cache.matched_tokens(taken[0].hint)
                taken[0].prompt_left = max(1, taken[0].hint.prompt_tokens - num_cached)
                self.running += taken
            each = taken.pop(0)
            num_taken = min(num_left, each.prompt_left)
            num_left, each.prompt_left = num_left - num_taken, each.prompt_left - num_taken
            begun += [] if each.prompt_left else [each]
        return begun, CHUNK_TOKENS - num_left


@cache
def accepted(acceptance: tuple[float, ...], count: int) -> float:
    """Return the expected accepted tokens of a draft."""
    return expected_accepted(acceptance[:count])


@cache
def best_length(costs: CostCurve, num_decoding: int, acceptance: tuple[float, ...]) -> int:
    """Return the number of draft tokens with the highest goodput."""
    return max(
        _LENGTHS,
        key=lambda count: (1 + accepted(acceptance, count)) / costs.step_s(num_decoding, count),
    )


@cache
def curve_of(costs: CostCurve, acceptance: tuple[float, ...]) -> ServiceCurve:
    """Return what a replica reports."""
    rates = []
    for size in _SIZES:
        count = best_length(costs, size, acceptance)
        rates.append((1 + accepted(acceptance, count)) / costs.step_s(size, count))
    prompts_s = costs.step_s(1, 0, num_rows=CHUNK_TOKENS)
    return ServiceCurve(_SIZES, tuple(rates), CHUNK_TOKENS / prompts_s)


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
    """Requests of which half continue a conversation. bursts: factors of the rate, each 5 s."""

    requests_per_s: float
    seconds: float
    seed: int
    bursts: tuple[float, ...] = (0.4, 0.7, 1.0, 1.9)

    def requests(self) -> list[Request]:
        """Return the requests by time."""
        chance, now_s, burst_until_s, burst = random.Random(self.seed), 0.0, 0.0, 1.0
        lengths: dict[int, int] = {}  # of conversations
        found: list[Request] = []
        while True:
            now_s += chance.expovariate(self.requests_per_s * burst)
            if now_s >= self.seconds:
                return found
            if now_s >= burst_until_s:
                burst = chance.choice(self.bursts)
                burst_until_s = now_s + chance.expovariate(1 / 5)
            talk = len(found)
            num_prompt_tokens = 50 + int(min(12_000, chance.lognormvariate(6.2, 1.2)))
            if lengths and chance.random() < 0.5:
                talk = chance.choice(list(lengths))
                num_prompt_tokens = lengths.pop(talk) + chance.randrange(20, 200)
            num_output_tokens = 8 + int(min(600, chance.expovariate(1 / 150)))
            if num_prompt_tokens < 14_000:
                lengths[talk] = num_prompt_tokens + num_output_tokens
            acceptance = ACCEPTANCE[talk % len(ACCEPTANCE)]
            hint = _hint(talk, num_prompt_tokens)
            found.append(Request(str(len(found)), now_s, hint, num_output_tokens, acceptance))


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
    replicas = [Replica(str(index), COSTS[name], cache_tokens) for index, name in enumerate(costs)]
    picker, requests, scraped_s = make(len(replicas)), trace.requests(), -SCRAPE_S
    in_transit = deque[tuple[float, int, Request]]()

    def advance(now_s: float) -> None:
        while in_transit and in_transit[0][0] <= now_s:
            arrives_s, index, request = in_transit.popleft()
            replicas[index].run_until(arrives_s)
            replicas[index].waiting.append(request)
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
                picker.scrape(index, each.report(), scraped_s)
        advance(request.at_s)
        in_transit.append((request.at_s + TRANSIT_S, picker.choose(request), request))
    advance(math.inf)
    return requests
