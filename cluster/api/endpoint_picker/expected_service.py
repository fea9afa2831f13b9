"""The service that a request would get of an endpoint, and what it would take from others there.

Pure functions of the endpoint's curve and load. Times are in seconds, goodput is in requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median_low
from typing import NamedTuple

from cluster.config.objective import Objective
from specdec.types.reports.service_curve import ServiceCurve

TYPICAL_CURVE = ServiceCurve((1, 64), (60.0, 20.0), 5000.0)
"""Assumed where no endpoint has a curve: queues and prefixes alone decide then."""

_MOST_PROMPT_SHARE = 0.8

_FIRST_SPREAD, _TOKEN_SPREAD = 1.0, 0.4
"""Standard deviations of both latencies around the expected ones, in their limits. Lengths of
outputs and later arrivals are unknown; narrow ones would see no difference where all are late."""

_LEAST_SLACK = 0.1
"""Least part of the limit of a token's time that is left for the prompts of others."""

_PROMPT_PRICE = 0.5
"""Requests lost later for each limit to the first token that the endpoint spends on a prompt."""

_WAIT_PRICE = 0.02
"""Requests that a wait of one limit is worth. It decides where no endpoint meets the objective, as
for a time per token that none reaches."""

_TAIL_PRICE, _MOST_WAIT = 3.0, 1.0
"""Requests that the square of a wait is worth, in limits, beyond the pool's mean wait and
`_MOST_WAIT` limits: late requests go where they harm nothing, but not all to one endpoint."""


class EndpointLoad(NamedTuple):
    """An endpoint as a request arrives.

    num_streams: choices of requests that run or wait there. num_seats: those that can run, by the
    batch and the KV cache. num_in_time: those of num_streams whose first token was, or still can
    be, within the limit. backlog_tokens: prompt tokens that are not computed yet, cached ones
    aside. prompt_share: part of the last seconds that prompts took. output_tokens: expected of a
    request.
    """

    curve: ServiceCurve
    num_streams: float
    num_seats: float
    num_in_time: float
    backlog_tokens: float
    prompt_share: float
    output_tokens: float


class ExpectedService(NamedTuple):
    """Latencies that a request would have, and those that it would add.

    first_token_s: time to its first token. output_token_s: mean time of each later one, and of one
    of another stream; before_s: that without the request. prompt_s: time of its prompt, for which
    the others wait. prompt_token_s: the same for each token of an output of mean length.
    """

    first_token_s: float
    output_token_s: float
    before_s: float
    prompt_s: float
    prompt_token_s: float


def expected_service(load: EndpointLoad, prompt_tokens: float) -> ExpectedService:
    """Return the service of a request. prompt_tokens: of its prompt, those not cached there.

    - First token: the prompts before it, the wait for a seat, and its prompt.
    - Tokens: those of the curve at one stream more, as prompts take their share of the time.
    """
    curve, output_tokens, most = load.curve, max(1.0, load.output_tokens), load.num_seats
    prompt_s, backlog_s = (
        tokens / curve.prompt_tokens_per_s for tokens in (prompt_tokens, load.backlog_tokens)
    )
    decode_share = 1 - min(_MOST_PROMPT_SHARE, load.prompt_share)
    before, after = min(load.num_streams, most), min(load.num_streams + 1, most)
    seat_s = (load.num_streams + 1 - after) / most * output_tokens * curve.token_s(most)
    before_s, token_s = (curve.token_s(number) / decode_share for number in (before, after))
    first_s, prompt_token_s = backlog_s + seat_s + prompt_s, prompt_s / output_tokens
    return ExpectedService(first_s, token_s, before_s, prompt_s, prompt_token_s)


def scores(
    loads: Sequence[EndpointLoad], prompt_tokens: Sequence[float], objective: Objective
) -> list[float]:
    """Return the goodput that the choice of each endpoint adds for a request.

    prompt_tokens: of its prompt, those that are not cached at each endpoint. The pool's mean wait
    is that of its backlog at all endpoints together, so a slow one hardly changes it.
    """
    found = list(map(expected_service, loads, prompt_tokens))
    rates = [each.curve.prompt_tokens_per_s for each in loads]
    mean_s = sum(map(math.prod, zip(rates, (each.first_token_s for each in found), strict=True)))
    mean_s /= sum(rates)
    return [
        added_goodput(service, load.num_in_time, objective, mean_s)
        for service, load in zip(found, loads, strict=True)
    ]


def added_goodput(
    service: ExpectedService, num_in_time: float, objective: Objective, mean_wait_s: float
) -> float:
    """Return the requests within the objective that the choice of an endpoint adds.

    - The probability that the request is within both limits,
    - minus the streams that it is expected to push beyond theirs, where late ones are lost already:
      of exponentially distributed outputs, its prompt pushes those that are too short to make up
      for it,
    - minus what its prompt and its wait are worth, also where it is late everywhere.

    num_in_time: as in EndpointLoad. mean_wait_s: of the pool.
    """
    first_s, token_s = objective
    own, before = (
        _within(each, token_s, _TOKEN_SPREAD) for each in (service.output_token_s, service.before_s)
    )
    slack_s = max(_LEAST_SLACK * token_s, token_s - service.output_token_s)
    after = own * math.exp(-service.prompt_token_s / slack_s)
    in_time = own * _within(service.first_token_s, first_s, _FIRST_SPREAD)
    price = _PROMPT_PRICE * service.prompt_s / first_s
    excess = max(0.0, (service.first_token_s - mean_wait_s) / first_s - _MOST_WAIT)
    late = _WAIT_PRICE * service.first_token_s / first_s + _TAIL_PRICE * excess**2
    return in_time - num_in_time * (before - after) - price - late


def _within(expected_s: float, limit_s: float, spread: float) -> float:
    """Return the probability that a normally distributed latency is within its limit."""
    return 0.5 * math.erfc((expected_s / limit_s - 1) / (spread * math.sqrt(2)))


def typical(curves: Sequence[ServiceCurve]) -> ServiceCurve:
    """Return the curve with the median rate of prompts, for endpoints without one."""
    if not curves:
        return TYPICAL_CURVE
    middle = median_low(each.prompt_tokens_per_s for each in curves)
    return next(each for each in curves if each.prompt_tokens_per_s == middle)
