"""Chooses the endpoint of a request: a pure function of what is known of each.

Costs are in tokens. `Score` is the seam between the measure of cost and the choice by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.api.base.prefix_record import PREFIX_WORTH, work_tokens
from cluster.api.base.routing_hint import MAX_OUTPUT_TOKENS, RoutingHint
from cluster.api.endpoint_picker.open_requests import OpenRequests
from cluster.api.endpoint_picker.reports import EndpointReport

OTHER_REQUEST_TOKENS = 512
"""Tokens that count for a request of which only the endpoint's report is known."""

ADAPTER_TOKENS = 1024
"""Tokens that count for a LoRA adapter that is not in use at an endpoint."""

UNREAD = RoutingHint((), MAX_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS)
"""The hint of a request whose body is not readable, or has no prompt."""


@dataclass(frozen=True)
class PickRequest:
    """A request for which an endpoint is chosen.

    model: the name in the request, of a model or of an adapter; empty without one. is_adapter:
    whether an endpoint reports an adapter of that name. num_choices: the request's streams.
    """

    hint: RoutingHint = UNREAD
    model: str = ""
    is_adapter: bool = False
    num_choices: int = 1


@dataclass(frozen=True)
class Candidate:
    """An endpoint that may be chosen, as far as it is known.

    matched_tokens: of the request's prompt, in its prefix cache. open_requests: those that this
    picker has sent there. num_others: requests of other senders. report: the last one; None before
    any. last_pick: number of the pick that chose it last.
    """

    address: str
    matched_tokens: int = 0
    open_requests: OpenRequests = field(default_factory=OpenRequests)
    num_others: int = 0
    report: EndpointReport | None = None
    last_pick: int = 0


Score = Callable[[Sequence[Candidate], PickRequest], Sequence[float]]
"""The costs of a request at endpoints, in their order; the least is chosen."""


def expected_tokens(candidates: Sequence[Candidate], request: PickRequest) -> list[float]:
    """Return the tokens that a request is expected to wait for at endpoints, its own included.

    - Those of open requests, and of queued ones again: they show that the batch is full.
    - The request's own; a token of a cached prefix saves PREFIX_WORTH.
    - Those that have to leave the KV cache first.
    - ADAPTER_TOKENS for an adapter that is not in use there, twice where another has to go.
    """
    return [_expected_tokens(each, request) for each in candidates]


def _expected_tokens(candidate: Candidate, request: PickRequest) -> float:
    work = work_tokens(request.hint, candidate.matched_tokens)
    cost = candidate.open_requests.tokens + OTHER_REQUEST_TOKENS * candidate.num_others
    cost += work - (PREFIX_WORTH - 1) * candidate.matched_tokens
    report = candidate.report
    if report is not None:
        cost += OTHER_REQUEST_TOKENS * report.num_waiting
        cost += cache_tokens_missing(candidate, request.hint)
    if request.is_adapter:
        cost += adapter_tokens(request.model, report)
    return cost


def cache_tokens_missing(candidate: Candidate, hint: RoutingHint) -> int:
    """Return the tokens that have to leave the KV cache before the request fits."""
    report = candidate.report
    if report is None or report.cache_tokens is None:
        return 0
    num_free = round(report.cache_tokens * (1 - report.kv_cache_usage))
    return max(0, work_tokens(hint, candidate.matched_tokens) - num_free)


def adapter_tokens(adapter: str, report: EndpointReport | None) -> int:
    """Return the tokens that count for an adapter that may not be in use at an endpoint."""
    if report is None or report.max_adapters is None:
        return ADAPTER_TOKENS
    if adapter in report.adapters:
        return 0
    return ADAPTER_TOKENS * (2 if len(report.adapters) >= report.max_adapters else 1)


def ranked(
    candidates: Sequence[Candidate], request: PickRequest, score: Score = expected_tokens
) -> list[Candidate]:
    """Return the candidates, the best first. Equal ones take turns."""
    costs = zip(score(candidates, request), candidates, strict=True)
    return [each for _, each in sorted(costs, key=lambda pair: (pair[0], pair[1].last_pick))]
