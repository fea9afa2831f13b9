"""The requests that this picker has sent to an endpoint and that have not ended."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from cluster.api.base.prefix_record import work_tokens
from cluster.api.base.routing_hint import RoutingHint
from cluster.api.endpoint_picker.reports import EndpointReport

_RECENT_S = 10.0
"""Time constant of the rate of prompts."""


@dataclass(eq=False)
class OpenRequest:
    """A request that was sent at `sent_at_s`, after `num_reports` reports.

    tokens: all that are to be computed for it. prompt_tokens: those of its prompt. recent_tokens:
    those that count for the rate of prompts. is_late: it had no token within the limit.
    """

    tokens: int
    prompt_tokens: int
    recent_tokens: int
    num_choices: int
    sent_at_s: float
    num_reports: int
    is_late: bool = False


class OpenRequests:
    """Open requests of an endpoint, for a picker that sends it most of its requests.

    Prompts are computed in the order of arrival, so the reported number of streams without a token
    determines which requests these are: the last ones sent. Their uncached tokens are known here.
    A request has a stream for each choice, and one prompt. Each operation costs O(1), amortized.
    """

    def __init__(self, limit_s: float = math.inf) -> None:
        """Begin without a report. limit_s: of the time to the first token."""
        self.tokens = 0  # of all
        self.num_others_waiting = 0  # streams of other senders without a token, by the last report
        self._num_others_decoding = 0
        self._limit_s = limit_s
        self._decoding = OrderedDict[OpenRequest, None]()  # with tokens; the oldest first, as below
        self._waiting = OrderedDict[OpenRequest, None]()  # without one
        self._undecided = OrderedDict[OpenRequest, None]()  # those of them that are not late
        self._waiting_tokens = 0  # of their prompts
        self._num_own = self._num_own_waiting = self._num_late = 0  # streams
        self._num_new = 0  # those sent since the last report
        self._num_reports = 0
        self._head: OpenRequest | None = None  # the request whose prompt is being computed
        self._head_since_s = -math.inf
        self._recent_tokens = 0.0  # of recent prompts, decayed
        self._recent_at_s = 0.0

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self._decoding) + len(self._waiting)

    @property
    def num_streams(self) -> int:
        """All streams, those of other senders included."""
        return self._num_own + self._num_others_decoding + self.num_others_waiting

    def begin(
        self,
        hint: RoutingHint,
        matched_tokens: int,
        now_s: float,
        *,
        num_choices: int = 1,
        has_prompt: bool = True,
    ) -> OpenRequest:
        """Add a request that is sent now.

        matched_tokens: of its prompt, those cached there. has_prompt: whether one is known; others
        do not count for the rate of prompts.
        """
        tokens, prompt = (
            work_tokens(hint, matched_tokens),
            max(1, hint.prompt_tokens - matched_tokens),
        )
        recent = prompt if has_prompt else 0
        sent = OpenRequest(tokens, prompt, recent, num_choices, now_s, self._num_reports)
        self.tokens += tokens
        self._num_own += num_choices
        self._num_new += num_choices
        self._wait(sent)
        self._find_head(now_s)
        self._add_recent(recent, now_s)
        return sent

    def end(self, sent: OpenRequest, now_s: float, *, has_moved: bool = False) -> None:
        """Remove a request. has_moved: to another endpoint, which has computed it.

        A prompt that was not computed by a report since leaves the rate of prompts. One that ends
        before any report counts: short answers do.
        """
        is_known = sent.num_reports < self._num_reports
        if has_moved or (is_known and sent in self._waiting):
            self._add_recent(-sent.recent_tokens * _decay(now_s - sent.sent_at_s), now_s)
        if sent in self._waiting:
            self._leave(sent)
        else:
            del self._decoding[sent]
        self.tokens -= sent.tokens
        self._num_own -= sent.num_choices
        self._num_new -= 0 if is_known else sent.num_choices
        self._num_late -= sent.num_choices * sent.is_late
        self._find_head(now_s)

    def renew(self, report: EndpointReport, now_s: float) -> None:
        """Find the requests without a token by a report that has just been read.

        - Those that were sent since the last report and are missing in this one are in transit.
        - Those that have had a token by their second report or later stay so: other senders have
          the rest.
        """
        self._count_late(now_s)
        num_missing = max(0, self._num_own - report.num_requests)
        num_without = max(0, report.num_requests - report.num_decoding)
        num_without += min(self._num_new, num_missing)
        while self._waiting:
            oldest = next(iter(self._waiting))
            if self._num_own_waiting - oldest.num_choices < num_without:
                break
            self._leave(oldest)
            self._decoding[oldest] = None
        while self._decoding and self._num_own_waiting < num_without:
            latest = next(reversed(self._decoding))
            if self._num_reports - latest.num_reports > 1:
                break
            del self._decoding[latest]
            self._wait(latest, is_last=False)
        self._num_reports, self._num_new = self._num_reports + 1, 0
        self.num_others_waiting = max(0, num_without - self._num_own_waiting)
        num_decoding = self._num_own - min(self._num_own_waiting, num_without)
        self._num_others_decoding = max(0, report.num_decoding - num_decoding)
        self._find_head(now_s)

    def num_late(self, now_s: float) -> int:
        """Return the streams of requests that had no token within the limit."""
        self._count_late(now_s)
        return self._num_late

    def prompt_tokens_left(self, tokens_per_s: float, now_s: float) -> float:
        """Return the tokens of prompts that are not computed yet. tokens_per_s: of a prompt."""
        if self._head is None:
            return 0.0
        computed = (now_s - self._head_since_s) * tokens_per_s
        return self._waiting_tokens - min(self._head.prompt_tokens, computed)

    def prompt_tokens_per_s(self, now_s: float) -> float:
        """Return the recent rate of prompt tokens."""
        return self._recent_tokens * _decay(now_s - self._recent_at_s) / _RECENT_S

    def check_integrity(self) -> None:
        """Assert that the counts are those of the requests."""
        waiting, late = list(self._waiting), [each for each in self._all() if each.is_late]
        assert self._waiting_tokens == sum(each.prompt_tokens for each in waiting)
        assert self._num_own_waiting == sum(each.num_choices for each in waiting)
        assert self._num_own == sum(each.num_choices for each in self._all())
        assert self._num_late == sum(each.num_choices for each in late)
        assert list(self._undecided) == [each for each in waiting if not each.is_late]
        assert self.tokens == sum(each.tokens for each in self._all())

    def _all(self) -> list[OpenRequest]:
        """Return all requests, the oldest first."""
        return [*self._decoding, *self._waiting]

    def _wait(self, sent: OpenRequest, *, is_last: bool = True) -> None:
        """Add a request to those without a token, as the last or the first."""
        for each in (self._waiting, *(() if sent.is_late else (self._undecided,))):
            each[sent] = None
            each.move_to_end(sent, last=is_last)
        self._waiting_tokens += sent.prompt_tokens
        self._num_own_waiting += sent.num_choices

    def _leave(self, sent: OpenRequest) -> None:
        """Remove a request from those without a token."""
        del self._waiting[sent]
        self._undecided.pop(sent, None)
        self._waiting_tokens -= sent.prompt_tokens
        self._num_own_waiting -= sent.num_choices

    def _count_late(self, now_s: float) -> None:
        """Count those that have become late."""
        while self._undecided:
            oldest = next(iter(self._undecided))
            if now_s - oldest.sent_at_s <= self._limit_s:
                break
            del self._undecided[oldest]
            oldest.is_late = True
            self._num_late += oldest.num_choices

    def _find_head(self, now_s: float) -> None:
        """Note which prompt is being computed, and since when."""
        head = next(iter(self._waiting), None)
        if head is not self._head:
            self._head, self._head_since_s = head, now_s

    def _add_recent(self, tokens: float, now_s: float) -> None:
        self._recent_tokens = self._recent_tokens * _decay(now_s - self._recent_at_s) + tokens
        self._recent_at_s = now_s


def _decay(seconds: float) -> float:
    return math.exp(-seconds / _RECENT_S)
