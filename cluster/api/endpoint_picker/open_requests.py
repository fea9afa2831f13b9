"""The requests that this picker has sent to an endpoint and that have not ended."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import takewhile

from cluster.api.base.prefix_record import work_tokens
from cluster.api.base.routing_hint import RoutingHint
from cluster.api.endpoint_picker.reports import EndpointReport

_RECENT_S = 10.0
"""Time constant of the rate of prompts."""


@dataclass(eq=False)
class OpenRequest:
    """A request that was sent at `sent_at_s`, after `num_reports` reports.

    tokens: all that are to be computed for it. prompt_tokens: those of its prompt. first_at_s: time
    of the report by which it has a token; infinite before.
    """

    tokens: int
    prompt_tokens: int
    sent_at_s: float
    num_reports: int
    first_at_s: float = math.inf

    @property
    def has_token(self) -> bool:
        """Return whether it has a token by the last report."""
        return self.first_at_s < math.inf


class OpenRequests:
    """Open requests of an endpoint, for a picker that sends it most of its requests.

    Prompts are computed in the order of arrival, so the reported number of requests without a token
    determines which ones these are: the last ones sent. Their uncached tokens are known here.
    """

    def __init__(self) -> None:
        """Begin without a report."""
        self.tokens = 0  # of all
        self.num_others_waiting = 0  # requests of other senders without a token, by the last report
        self._num_others_decoding = 0
        self._open: dict[OpenRequest, None] = {}  # the oldest first, which have tokens
        self._num_reports = 0
        self._head: OpenRequest | None = None  # the request whose prompt is being computed
        self._head_since_s = -math.inf
        self._recent_tokens = 0.0  # of recent prompts, decayed
        self._recent_at_s = 0.0

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self._open)

    @property
    def num_streams(self) -> int:
        """All requests, those of other senders included."""
        return len(self) + self._num_others_decoding + self.num_others_waiting

    def begin(self, hint: RoutingHint, matched_tokens: int, now_s: float) -> OpenRequest:
        """Add a request that is sent now. matched_tokens: of its prompt, those cached there."""
        prompt_tokens = max(1, hint.prompt_tokens - matched_tokens)
        sent = OpenRequest(
            work_tokens(hint, matched_tokens), prompt_tokens, now_s, self._num_reports
        )
        self._open[sent] = None
        self.tokens += sent.tokens
        self._find_head(now_s)
        self._add_recent(prompt_tokens, now_s)
        return sent

    def end(self, sent: OpenRequest, now_s: float, *, has_moved: bool = False) -> None:
        """Remove a request. has_moved: to another endpoint, which has computed it."""
        del self._open[sent]
        self.tokens -= sent.tokens
        self._find_head(now_s)
        if has_moved:
            self._add_recent(-sent.prompt_tokens * _decay(now_s - sent.sent_at_s), now_s)

    def renew(self, report: EndpointReport, now_s: float) -> None:
        """Find the requests without a token by a report that has just been read.

        Those that have had one by their second report or later stay so: other senders have the
        rest. The first may be older than a request's arrival.
        """
        num_without = max(0, report.num_requests - report.num_decoding)
        for each in reversed(self._open):
            if each.has_token and self._num_reports - each.num_reports > 1:
                break
            each.first_at_s = math.inf if num_without else min(each.first_at_s, now_s)
            num_without -= not each.has_token
        self._num_reports += 1
        self.num_others_waiting = num_without
        num_with = sum(each.has_token for each in self._open)
        self._num_others_decoding = max(0, report.num_decoding - num_with)
        self._find_head(now_s)

    def num_late(self, limit_s: float, now_s: float) -> int:
        """Return the requests that had no token within a limit."""
        return sum(min(each.first_at_s, now_s) - each.sent_at_s > limit_s for each in self._open)

    def prompt_tokens_left(self, tokens_per_s: float, now_s: float) -> float:
        """Return the tokens of prompts that are not computed yet. tokens_per_s: of a prompt."""
        waiting = sum(each.prompt_tokens for each in self._waiting())
        if self._head is None:
            return waiting
        return waiting - min(self._head.prompt_tokens, (now_s - self._head_since_s) * tokens_per_s)

    def prompt_tokens_per_s(self, now_s: float) -> float:
        """Return the recent rate of prompt tokens."""
        return self._recent_tokens * _decay(now_s - self._recent_at_s) / _RECENT_S

    def _waiting(self) -> list[OpenRequest]:
        """Return the requests without a token, the latest first."""
        return list(takewhile(lambda each: not each.has_token, reversed(self._open)))

    def _find_head(self, now_s: float) -> None:
        """Note which prompt is being computed, and since when."""
        head = next(iter(self._waiting()[::-1]), None)
        if head is not self._head:
            self._head, self._head_since_s = head, now_s

    def _add_recent(self, tokens: float, now_s: float) -> None:
        self._recent_tokens = self._recent_tokens * _decay(now_s - self._recent_at_s) + tokens
        self._recent_at_s = now_s


def _decay(seconds: float) -> float:
    return math.exp(-seconds / _RECENT_S)
