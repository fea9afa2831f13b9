"""The endpoints of a pool, and the picks among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import InitVar, dataclass, field, replace
from math import inf

from cluster.api.endpoint_picker.choice import (
    UNREAD,
    Candidate,
    PickRequest,
    ranked,
)
from cluster.api.endpoint_picker.endpoint import Endpoint
from cluster.api.endpoint_picker.goodput_score import score_for
from cluster.api.endpoint_picker.open_requests import OpenRequest
from cluster.config.objective import Objective
from specdec.types.errors import NotReadyError, OverloadedError


@dataclass
class Pick:
    """A chosen endpoint, whose request is open there until `end`.

    fallbacks: addresses of the next best ones. clock: monotonic seconds. matched_tokens: of the
    prompt, in its prefix cache.
    """

    endpoint: Endpoint
    fallbacks: tuple[str, ...]
    request: PickRequest
    clock: Callable[[], float]
    matched_tokens: InitVar[int]
    _sent: OpenRequest = field(init=False)
    _is_open: bool = True

    def __post_init__(self, matched_tokens: int) -> None:
        self._sent = self.endpoint.begin(self.request, matched_tokens, self.clock())

    def end(self) -> None:
        """End the request; further calls have no effect."""
        if self._is_open:
            self._is_open = False
            self.endpoint.open_requests.end(self._sent, self.clock())

    def move(self, endpoint: Endpoint) -> None:
        """Continue at the endpoint that served the request in place of the chosen one."""
        if self._is_open and endpoint is not self.endpoint:
            self.endpoint.open_requests.end(self._sent, self.clock(), has_moved=True)
            self.endpoint = endpoint
            matched_tokens = endpoint.record.matched_tokens(self.request.hint)
            self._sent = endpoint.begin(self.request, matched_tokens, self.clock())


class Pool:
    """The endpoints that requests can be sent to."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        max_waiting: int | None = None,
        num_fallbacks: int = 0,
        objective: Objective | None = None,
    ) -> None:
        """Make a pool without endpoints.

        clock: monotonic seconds. max_waiting: queue length at which an endpoint gets no more
        requests; None for no limit. num_fallbacks: most addresses of a pick after the first.
        objective: None to choose by tokens.
        """
        self.clock = clock
        self.refusals = Counter[int]()  # by HTTP status
        self._endpoints: dict[str, Endpoint] = {}
        self._is_listed = False
        self._num_picks = 0
        self._max_waiting = max_waiting
        self._num_fallbacks = num_fallbacks
        self.objective = objective
        self._limit_s = inf if objective is None else objective.first_token_s
        self._score = score_for(objective, clock)

    def set_addresses(self, addresses: Iterable[str]) -> None:
        """Set the endpoints; the state of those that stay is kept."""
        known = self._endpoints
        self._endpoints = {
            each: known.get(each) or Endpoint(each, self._limit_s) for each in addresses
        }
        self._is_listed = True

    @property
    def endpoints(self) -> Collection[Endpoint]:
        """The endpoints."""
        return self._endpoints.values()

    @property
    def is_synced(self) -> bool:
        """Return whether the endpoints are known, and each has been scraped at least once."""
        return self._is_listed and all(each.is_scraped for each in self.endpoints)

    def get(self, address: str) -> Endpoint | None:
        """Return the endpoint of an address; None if it is none of the pool."""
        return self._endpoints.get(address)

    def pick(self, request: PickRequest, subset: Collection[str] | None = None) -> Pick:
        """Choose an endpoint, and count the request there. subset: addresses to choose from.

        Raises NotReadyError without a ready endpoint, OverloadedError where all queues are full.
        An endpoint that lacks the model is chosen only where none is known to have it: it answers
        with its error.
        """
        usable = self._usable(request.model, subset)
        if not usable:
            self.refusals[503] += 1
            raise NotReadyError("no replica is ready; try again later")
        request = replace(request, is_adapter=_is_adapter(request.model, usable))
        candidates = [each.candidate(request) for each in usable if not self._is_full(each)]
        if not candidates:
            self.refusals[429] += 1
            raise OverloadedError("all replicas have long queues; try again later")
        best, *others = ranked(candidates, request, self._score)
        chosen = self._endpoints[best.address]
        chosen.choices[_reason(best, request)] += 1
        self._num_picks += 1
        chosen.last_pick = self._num_picks
        fallbacks = tuple(each.address for each in others[: self._num_fallbacks])
        return Pick(chosen, fallbacks, request, self.clock, best.matched_tokens)

    def _is_full(self, endpoint: Endpoint) -> bool:
        """Return whether a queue is too long; not by a report from before the endpoint was lost."""
        report = endpoint.last_report
        if self._max_waiting is None or report is None or not endpoint.is_up:
            return False
        return report.num_waiting >= self._max_waiting

    def _usable(self, model: str, subset: Collection[str] | None) -> list[Endpoint]:
        """Return the endpoints that may serve a model, are up and not ejected.

        Where all are ejected or too slow to be scraped, as in an overload, these are used still.
        """
        listed = [each for each in self.endpoints if subset is None or each.address in subset]
        if any(each.is_known_to_serve(model) for each in listed):
            listed = [each for each in listed if each.may_serve(model)]
        up = [each for each in listed if each.is_up]
        now_s = self.clock()
        sound = [each for each in up if not each.is_ejected(now_s)]
        usable = sound or up or [each for each in listed if each.may_be_up]
        return [each for each in usable if each.may_serve(model)] or usable


def _is_adapter(name: str, endpoints: Iterable[Endpoint]) -> bool:
    """Return whether an endpoint has loaded an adapter of this name, or uses it."""
    reports = ((each.adapters, each.last_report) for each in endpoints)
    return any(name in loaded or (used and name in used.adapters) for loaded, used in reports)


def _reason(chosen: Candidate, request: PickRequest) -> str:
    """Return what the choice could go by, for the metrics."""
    if request.hint is UNREAD:
        return "unread"
    report = chosen.report
    if request.is_adapter and report is not None and request.model in report.adapters:
        return "adapter"
    return "prefix" if chosen.matched_tokens else "load"
