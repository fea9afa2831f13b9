"""Simulated replicas with prompts, prefix caches and drafts, by events instead of steps."""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from functools import cache
from operator import mul
from typing import NamedTuple

from cluster.api.base.prefix_record import PrefixRecord
from cluster.api.base.routing_hint import RoutingHint
from cluster.api.endpoint_picker.reports import EndpointReport, expected_output_tokens
from cluster.config.objective import Objective
from specdec.types.reports.service_curve import ServiceCurve
from tests.specdec.speculation.policy.synthetic_service import CostCurve, expected_accepted

COSTS = {
    "fast": CostCurve(weights_s=0.010, row_s=0.00005, draft_s=0.0008),
    "slow": CostCurve(weights_s=0.010, row_s=0.0002, draft_s=0.0008),
}
ACCEPTANCE = ((0.85, 0.8, 0.8, 0.75, 0.7), (0.6, 0.5, 0.5, 0.45, 0.4), (0.2, 0.2, 0.1, 0.1, 0.1))
"""Rates by position, for each kind of conversation."""

CACHE_TOKENS, MAX_NUM_SEQS, CHUNK_TOKENS = 200_000, 64, 512
_KINDS, _LENGTHS, _SIZES = range(len(ACCEPTANCE)), range(6), (1, 2, 4, 8, 16, 32, MAX_NUM_SEQS)


@dataclass(eq=False)
class Request:
    """A request that arrives at `at_s`. kind: of its conversation, in ACCEPTANCE."""

    request_id: str
    at_s: float
    hint: RoutingHint
    num_output_tokens: int
    kind: int
    prompt_left: int = 0
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


class Steps(NamedTuple):
    """Equal steps. gains: tokens of a stream in each of them, by kind."""

    begin_s: float
    step_s: float
    gains: tuple[float, ...]
    number: float

    @property
    def end_s(self) -> float:
        """Return when the last one ends."""
        return self.begin_s + self.number * self.step_s


IDLE = Steps(math.inf, 0.0, (0.0,) * len(ACCEPTANCE), 0)


@dataclass(eq=False)
class Replica:
    """Continuous batching with chunked prompts.

    cache_tokens: capacity of the KV cache, where running requests have their tokens reserved.
    Steps with a part of a prompt have no drafts; others have those of the highest goodput, and are
    alike until a stream ends or a request gets a seat: such a run of steps is one event.
    """

    costs: CostCurve
    cache_tokens: int = CACHE_TOKENS
    waiting: deque[Request] = field(default_factory=deque)
    prompts: deque[Request] = field(default_factory=deque)  # running ones without a token
    cache: PrefixRecord = field(init=False)
    ended: list[Request] = field(default_factory=list)  # since they were last collected
    steps: Steps = IDLE

    def __post_init__(self) -> None:
        self.cache = PrefixRecord(self.cache_tokens)
        self._num_running = [0 for _ in _KINDS]
        self._num_decoding, self._num_reserved = 0, 0
        self._progress = [0.0 for _ in _KINDS]  # tokens of a stream since the beginning
        self._streams: list[list[tuple[float, str, Request]]] = [[] for _ in _KINDS]
        self._begun: list[Request] = []  # requests whose prompt these steps end
        self._num_ended, self._num_tokens = 0, 0.0

    def run_until(self, now_s: float) -> None:
        """Run the steps that end by a time."""
        while self.steps is not IDLE and self.steps.end_s <= now_s:
            self._finish()
            self._begin(self.steps.end_s)

    def add(self, request: Request, now_s: float) -> None:
        """Add a request that arrives now: the step after the one in progress can begin it."""
        self.run_until(now_s)
        self.waiting.append(request)
        if self.steps is IDLE:
            self._begin(now_s)
        elif self.steps.number > 1 and self._may_run_another():
            number = 1 + (now_s - self.steps.begin_s) // self.steps.step_s
            self.steps = self.steps._replace(number=min(number, self.steps.number))

    def report(self, now_s: float) -> EndpointReport:
        """Return the gauges of this moment, until which the steps have run."""
        num_running = sum(self._num_running)
        return EndpointReport(
            num_running=num_running,
            num_waiting=len(self.waiting),
            kv_cache_usage=min(1.0, self._num_reserved / self.cache_tokens),
            cache_tokens=self.cache_tokens,
            num_decoding=num_running - len(self.prompts) - len(self._begun),
            curve=curve_of(self.costs, mean_acceptance(tuple(self._num_running))),
            output_tokens=expected_output_tokens(self._tokens_by(now_s), self._num_ended),
        )

    def _may_run_another(self) -> bool:
        """Return whether the oldest waiting request has a seat; one that runs alone always has."""
        num_running = sum(self._num_running)
        if not self.waiting or num_running == MAX_NUM_SEQS:
            return False
        num_tokens = self._num_reserved + self.waiting[0].kv_tokens
        return not num_running or num_tokens <= self.cache_tokens

    def _begin(self, now_s: float) -> None:
        """Begin a step with prompts, or all steps until a stream ends."""
        num_prompt_tokens = self._take_prompts()
        if num_prompt_tokens:
            step_s = self.costs.step_s(self._num_decoding, 0, num_rows=num_prompt_tokens)
            self.steps = Steps(now_s, step_s, tuple(1.0 for _ in _KINDS), 1)
        elif self._num_decoding:
            step_s, gains = decode_step(self.costs, tuple(self._num_running))
            number = min(
                math.ceil((streams[0][0] - progress) / gain)
                for streams, progress, gain in zip(
                    self._streams, self._progress, gains, strict=True
                )
                if streams
            )
            self.steps = Steps(now_s, step_s, gains, max(1, number))
        else:
            self.steps = IDLE

    def _take_prompts(self) -> int:
        """Take a chunk of prompts, note the requests whose prompt it ends; return its tokens.

        A request runs from the step on that has room for its first prompt token.
        """
        num_left = CHUNK_TOKENS
        while num_left and (self.prompts or self._may_run_another()):
            if not self.prompts:
                self._run(self.waiting.popleft())
            first = self.prompts[0]
            num_taken = min(num_left, first.prompt_left)
            num_left, first.prompt_left = num_left - num_taken, first.prompt_left - num_taken
            if not first.prompt_left:
                self._begun.append(self.prompts.popleft())
        return CHUNK_TOKENS - num_left

    def _run(self, request: Request) -> None:
        num_cached = self.cache.matched_tokens(request.hint)
        request.prompt_left = max(1, request.hint.prompt_tokens - num_cached)
        self.prompts.append(request)
        self._num_running[request.kind] += 1
        self._num_reserved += request.kv_tokens

    def _finish(self) -> None:
        """Count the tokens of the steps; begin and end streams."""
        self._num_tokens = self._tokens_by(self.steps.end_s) + len(self._begun)
        for kind, streams in enumerate(self._streams):
            self._progress[kind] += self.steps.gains[kind] * self.steps.number
            while streams and streams[0][0] <= self._progress[kind] + 1e-9:
                self._end(heapq.heappop(streams)[2])
        for each in self._begun:
            each.first_at_s = self.steps.end_s
            self.cache.add(each.hint)
            last = self._progress[each.kind] + each.num_output_tokens - 1
            heapq.heappush(self._streams[each.kind], (last, each.request_id, each))
        self._num_decoding += len(self._begun)
        self._begun.clear()

    def _tokens_by(self, now_s: float) -> float:
        """Return the tokens that have been generated by a time within these steps."""
        if self.steps is IDLE:
            return self._num_tokens
        number = min((now_s - self.steps.begin_s) / self.steps.step_s, self.steps.number)
        numbers = (len(each) for each in self._streams)
        return self._num_tokens + number * sum(map(mul, self.steps.gains, numbers))

    def _end(self, request: Request) -> None:
        request.ended_at_s = self.steps.end_s
        self.ended.append(request)
        self._num_running[request.kind] -= 1
        self._num_reserved -= request.kv_tokens
        self._num_decoding -= 1
        self._num_ended += 1


@cache
def mean_acceptance(numbers: tuple[int, ...]) -> tuple[float, ...]:
    """Return the rates that an engine observes. numbers: of running requests by kind."""
    total = sum(numbers)
    weights = [each / total for each in numbers] if total else [1 / len(numbers) for _ in numbers]
    columns = zip(*ACCEPTANCE, strict=True)
    return tuple(round(sum(map(mul, weights, each)), 1) for each in columns)


@cache
def decode_step(costs: CostCurve, numbers: tuple[int, ...]) -> tuple[float, tuple[float, ...]]:
    """Return the seconds of a step without a prompt, and the tokens of a stream by kind."""
    size = sum(numbers)
    count = best_length(costs, size, mean_acceptance(numbers))
    gains = (1 + expected_accepted(each[:count]) for each in ACCEPTANCE)
    return costs.step_s(size, count), tuple(gains)


@cache
def best_length(costs: CostCurve, num_decoding: int, acceptance: tuple[float, ...]) -> int:
    """Return the number of draft tokens with the highest goodput."""

    def tokens_per_s(count: int) -> float:
        return _stream_rate(costs, num_decoding, acceptance, count)

    return max(_LENGTHS, key=tokens_per_s)


def _stream_rate(
    costs: CostCurve, num_decoding: int, acceptance: tuple[float, ...], count: int
) -> float:
    return (1 + expected_accepted(acceptance[:count])) / costs.step_s(num_decoding, count)


@cache
def curve_of(costs: CostCurve, acceptance: tuple[float, ...]) -> ServiceCurve:
    """Return what a replica reports."""
    rates = [
        _stream_rate(costs, size, acceptance, best_length(costs, size, acceptance))
        for size in _SIZES
    ]
    prompts_s = costs.step_s(1, 0, num_rows=CHUNK_TOKENS)
    return ServiceCurve(_SIZES, tuple(rates), CHUNK_TOKENS / prompts_s)
