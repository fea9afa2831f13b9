"""The state of an endpoint: its last report, its prefixes, and what this picker has sent there."""

from __future__ import annotations

from collections import Counter, deque

from cluster.api.base.prefix_record import PrefixRecord
from cluster.api.endpoint_picker.choice import UNREAD, Candidate, PickRequest
from cluster.api.endpoint_picker.open_requests import OpenRequest, OpenRequests
from cluster.api.endpoint_picker.reports import EndpointReport

MAX_FAILED_SCRAPES = 3
"""Consecutive failed scrapes after which an endpoint is no candidate."""

MAX_FAILED_RESPONSES = 3
"""Failed responses of the last NUM_RESPONSES after which an endpoint is ejected."""

NUM_RESPONSES = 2 * MAX_FAILED_RESPONSES

_EJECTED_S = 1.0  # doubled by each further failure after it
_MAX_EJECTED_S = 30.0


class Endpoint:
    """An endpoint. Times are monotonic seconds."""

    def __init__(self, address: str, limit_s: float) -> None:
        """address: host:port. limit_s: of the time to the first token; infinite without one."""
        self.address = address
        self.record = PrefixRecord()
        self.models: frozenset[str] | None = None  # None: unknown
        self.adapters: frozenset[str] = frozenset()  # those of `models` that are adapters
        self.open_requests = OpenRequests(limit_s)
        self.num_failed_scrapes = 0  # consecutive ones
        self.is_scraped = False  # or failed to be
        self.last_pick = 0
        self.choices = Counter[str]()  # by reason
        self.scrape_errors = 0
        self.response_errors = 0
        self.last_report: EndpointReport | None = None
        self._reported_at_s = 0.0
        self._num_others = 0
        self._is_ready = self._is_refused = False
        self._have_failed = deque[bool](maxlen=NUM_RESPONSES)  # the last responses
        self._num_ejections = 0  # consecutive ones
        self._ejected_until_s = 0.0

    def apply(self, report: EndpointReport, *, is_ready: bool, now_s: float) -> None:
        """Store a report."""
        self.last_report, self._reported_at_s = report, now_s
        self._is_ready, self._is_refused = is_ready, False
        self._num_others = max(0, report.num_requests - self.num_open)
        self.open_requests.renew(report, now_s)
        self.num_failed_scrapes, self.is_scraped = 0, True
        if report.cache_tokens is not None:
            self.record.limit(report.cache_tokens)
        if report.models is not None:
            self.models, self.adapters = report.models, report.loaded_adapters

    def fail_scrape(self, *, is_refused: bool) -> None:
        """Record a scrape without a report. is_refused: nothing listens."""
        self.num_failed_scrapes += 1
        self._is_refused |= is_refused
        self.scrape_errors += 1
        self.is_scraped = True

    def respond(self, *, has_failed: bool, now_s: float) -> None:
        """Record a response: many failed ones eject the endpoint, longer each time.

        Those of requests from before an ejection do not prolong it.
        """
        self._have_failed.append(has_failed)
        self.response_errors += has_failed
        if sum(self._have_failed) < MAX_FAILED_RESPONSES:
            self._num_ejections = 0
        elif has_failed and not self.is_ejected(now_s):
            seconds = min(_EJECTED_S * 2 ** min(self._num_ejections, 16), _MAX_EJECTED_S)
            self._ejected_until_s = now_s + seconds
            self._num_ejections += 1

    @property
    def num_open(self) -> int:
        """Requests that this picker has sent there and that have not ended."""
        return len(self.open_requests)

    @property
    def is_up(self) -> bool:
        """Return whether it is ready and its scrapes succeed."""
        return self.may_be_up and self.num_failed_scrapes < MAX_FAILED_SCRAPES

    @property
    def may_be_up(self) -> bool:
        """Return whether it was ready and something listens: it may be too busy for scrapes."""
        return self._is_ready and not self._is_refused

    def may_serve(self, model: str) -> bool:
        """Return whether it is not known to lack a model; empty for a request that names none."""
        return not model or self.models is None or model in self.models

    def is_known_to_serve(self, model: str) -> bool:
        """Return whether a model is among those that it has reported."""
        return self.models is not None and model in self.models

    def is_ejected(self, now_s: float) -> bool:
        """Return whether too many of its responses have failed."""
        return now_s < self._ejected_until_s

    def report_age_s(self, now_s: float) -> float | None:
        """Return the age of the last report; None without one."""
        return None if self.last_report is None else now_s - self._reported_at_s

    def candidate(self, request: PickRequest) -> Candidate:
        """Return what is known of it for a request; the last report counts however old it is."""
        return Candidate(
            self.address,
            matched_tokens=self.record.matched_tokens(request.hint),
            open_requests=self.open_requests,
            num_others=self._num_others,
            report=self.last_report,
            last_pick=self.last_pick,
        )

    def begin(self, request: PickRequest, matched_tokens: int, now_s: float) -> OpenRequest:
        """Add an open request and its prefixes."""
        self.record.add(request.hint)
        return self.open_requests.begin(
            request.hint,
            matched_tokens,
            now_s,
            num_choices=request.num_choices,
            has_prompt=request.hint is not UNREAD,
        )
