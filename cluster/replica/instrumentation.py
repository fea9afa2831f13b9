"""What is measured of a replica's requests and steps, and traced where traces are wanted."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from cluster.config.serve_config import ServeConfig
from cluster.replica.traced_request import TracedRequest
from specdec.engine.metrics import DRAFT_TIME, VERIFY_TIME, Metrics
from specdec.engine.request_metrics import RequestObserver, TimedProposer, TimedTarget
from specdec.speculation.proposers import Proposer
from specdec.types.request import GenerateRequest
from specdec.types.worker import Target

if TYPE_CHECKING:
    from cluster.replica.tracing import Tracing


class ReplicaObserver:
    """Has an observer for each request, and times the target and the proposer."""

    def __init__(self, config: ServeConfig, replica: str, metrics: Metrics) -> None:
        """replica: the name that traces bear. metrics: where everything is counted."""
        self._metrics = metrics
        self._tracing = _tracing(config, replica)

    def begin(self, request_id: str, call: GenerateRequest) -> RequestObserver:
        """Return the observer of a request that has just arrived."""
        clock = time.perf_counter
        trace = self._tracing.begin(request_id, call, clock) if self._tracing else None
        if trace is None:
            return RequestObserver(request_id, self._metrics, clock)
        return TracedRequest(request_id, self._metrics, clock, trace=trace)

    def timed_target(self, target: Target) -> TimedTarget:
        """The same, with the seconds of each step observed."""
        return TimedTarget(target, self._observe_verify)

    def timed_proposer(self, proposer: Proposer | None) -> TimedProposer | None:
        """The same, with the seconds of each drafting observed; None where nothing drafts."""
        return None if proposer is None else TimedProposer(proposer, self._observe_draft)

    def close(self) -> None:
        """Sends the traces that are left, which may take seconds."""
        if self._tracing is not None:
            self._tracing.close()

    def _observe_draft(self, seconds: float) -> None:
        self._metrics[DRAFT_TIME].observe(seconds)
        if self._tracing is not None:
            self._tracing.steps.add_draft(seconds)

    def _observe_verify(self, seconds: float) -> None:
        self._metrics[VERIFY_TIME].observe(seconds)
        if self._tracing is not None:
            self._tracing.steps.add_verify(seconds)


def _tracing(config: ServeConfig, replica: str) -> Tracing | None:
    """None where no traces are wanted; the packages that make them are imported only then."""
    if config.otlp_traces_endpoint is None:
        return None
    from cluster.replica.tracing import tracing_to

    return tracing_to(config.otlp_traces_endpoint, config.served_model_name, replica)
