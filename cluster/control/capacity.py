"""Replicas needed for an objective: arrivals over what one replica serves within both limits.

The curve of a replica has its drafts: they give latency at low load, and at the load that just
meets the objective it has what is left of them, which may be nothing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from cluster.config.objective import Objective
from specdec.types.reports.service_curve import ServiceCurve

_LEAST_LOAD, _MOST_LOAD = 0.1, 0.9
"""Bounds of the part of its time that a replica may spend on prompts, if it does only that."""

CLEAR_S = 60.0
"""Least time within which requests that wait for additional replicas are served."""

_PRECISION = 0.01  # in streams


class Lengths(NamedTuple):
    """Mean tokens of a request. prompt_tokens: those that are not cached."""

    prompt_tokens: float
    output_tokens: float


class Capacity(NamedTuple):
    """Load that one replica serves within an objective: requests at a time, and per second."""

    num_streams: float
    requests_per_s: float


def capacity(curve: ServiceCurve, lengths: Lengths, objective: Objective) -> Capacity:
    """Return what a replica serves within an objective.

    With n streams a request takes w(n) = seconds of its prompt + output tokens / tokens per second
    of the batch, so it lasts n w(n): at most the limit of its output tokens. Prompts alone are a
    queue, in which one takes at most 1 / (1 - load) of its seconds. At least one stream is assumed,
    so that the demand is finite for an objective that no replica meets.
    """
    prompt_s = lengths.prompt_tokens / curve.prompt_tokens_per_s
    output_tokens = max(1.0, lengths.output_tokens)

    def work_s(num_streams: float) -> float:
        return prompt_s + output_tokens / curve.batch_tokens_per_s(num_streams)

    limit_s, low, high = output_tokens * objective.output_token_s, 1.0, float(curve.max_streams)
    if high * work_s(high) > limit_s:
        while high - low > _PRECISION:
            middle = (low + high) / 2
            low, high = (middle, high) if middle * work_s(middle) <= limit_s else (low, middle)
        high = low
    load = min(_MOST_LOAD, max(_LEAST_LOAD, 1 - prompt_s / objective.first_token_s))
    return Capacity(high, 1 / max(work_s(high), prompt_s / load))


def replicas_needed(
    requests_per_s: float, num_open: float, num_ready: int, one: Capacity, clear_s: float = CLEAR_S
) -> float:
    """Return the replicas that meet the objective, a fraction included.

    requests_per_s: arrivals, which overload does not cut. num_open: requests that run or wait.
    Requests at a time vary as in a Poisson process: their standard deviation is added. Replicas
    that are full stay, as outputs may be longer than before. What is open beyond the streams of
    those that are ready is work to be done within `clear_s`, beside the arrivals: it grows while
    others start, so it must not count as load of the future.
    """
    number = requests_per_s / one.requests_per_s
    full = min(num_ready, num_open / one.num_streams)
    excess = (num_open - full * one.num_streams) / (one.requests_per_s * clear_s)
    return max(number + math.sqrt(number / one.num_streams), max(number, full) + excess)
