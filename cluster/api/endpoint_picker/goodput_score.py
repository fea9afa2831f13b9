"""Costs of endpoints by the service that a request would get, for the choice among them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from cluster.api.endpoint_picker.choice import (
    OTHER_REQUEST_TOKENS,
    Candidate,
    PickRequest,
    Score,
    adapter_tokens,
    cache_tokens_missing,
    expected_tokens,
)
from cluster.api.endpoint_picker.expected_service import EndpointLoad, scores, typical
from cluster.api.endpoint_picker.reports import EndpointReport
from cluster.config.objective import Objective
from specdec.types.reports.service_curve import ServiceCurve

logger = logging.getLogger(__name__)

_MOST_OUTPUT_TOKENS = 2.0**20


def score_for(objective: Objective | None, clock: Callable[[], float]) -> Score:
    """Return the score of a picker: by goodput under an objective, otherwise by tokens."""
    return expected_tokens if objective is None else GoodputScore(objective, clock)


class GoodputScore:
    """A `Score` under an objective: less goodput costs more."""

    def __init__(self, objective: Objective, clock: Callable[[], float]) -> None:
        """clock: that of the pool."""
        self._objective, self._clock = objective, clock
        self._has_warned = False

    def __call__(self, candidates: Sequence[Candidate], request: PickRequest) -> list[float]:
        """Return the costs in requests; endpoints without a curve have the typical one.

        An adapter that is not in use counts as prompt tokens, and so do those that have to leave
        the KV cache first.
        """
        now_s, tokens, loads = self._clock(), [], []
        reports = [each.report for each in candidates if each.report is not None]
        substitute = typical([each.curve for each in reports if each.curve is not None])
        for each in candidates:
            uncached = max(1, request.hint.prompt_tokens - each.matched_tokens)
            adapter = adapter_tokens(request.model, each.report) if request.is_adapter else 0
            tokens.append(uncached + adapter + cache_tokens_missing(each, request.hint))
            loads.append(load_of(each, substitute, now_s))
            self._check_curve(each)
        return [-score for score in scores(loads, tokens, self._objective)]

    def _check_curve(self, candidate: Candidate) -> None:
        """Log the first endpoint whose report has no curve."""
        report = candidate.report
        if report is not None and report.curve is None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s reports no service curve, as only the policy goodput does; a typical one is "
                "assumed there",
                candidate.address,
            )


def load_of(candidate: Candidate, substitute: ServiceCurve, now_s: float) -> EndpointLoad:
    """Return the load of an endpoint now. substitute: its curve where the report has none.

    Prompts of other senders have OTHER_REQUEST_TOKENS; all of these requests are in time.
    """
    report, sent = candidate.report or EndpointReport(), candidate.open_requests
    curve = report.curve or substitute
    left = sent.prompt_tokens_left(curve.prompt_tokens_per_s, now_s)
    return EndpointLoad(
        curve,
        num_streams=sent.num_streams,
        num_seats=_seats(report, curve),
        num_in_time=sent.num_streams - sent.num_late(now_s),
        backlog_tokens=left + OTHER_REQUEST_TOKENS * sent.num_others_waiting,
        prompt_share=sent.prompt_tokens_per_s(now_s) / curve.prompt_tokens_per_s,
        output_tokens=min(report.output_tokens, _MOST_OUTPUT_TOKENS),
    )


def _seats(report: EndpointReport, curve: ServiceCurve) -> float:
    """Return the streams that can run: the KV cache has room for more like those that do."""
    if report.num_running == 0 or report.kv_cache_usage <= 0:
        return curve.max_streams
    return min(curve.max_streams, max(1.0, report.num_running / report.kv_cache_usage))
