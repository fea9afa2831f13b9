"""Metrics and, where enabled, traces of a replica's requests and steps."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from cluster.config.serve_config import ServeConfig
from cluster.replica.traced_request import TracedRequest
from specdec.engine.metrics import Metrics
from specdec.engine.request_metrics import RequestMetrics
from specdec.types.request import GenerateRequest

if TYPE_CHECKING:
    from cluster.replica.tracing import Tracing


class Instrumentation:
    """Makes the measurements of each request, and records those of the engine's steps."""

    def __init__(self, config: ServeConfig, replica: str, metrics: Metrics) -> None:
        """replica: its name in traces. metrics: the metrics of the replica."""
        self._metrics = metrics
        self._tracing = _tracing(config, replica)

    def begin(self, request_id: str, call: GenerateRequest) -> RequestMetrics:
        """Return the observer of a request that has just arrived."""
        clock = time.perf_counter
        trace = self._tracing.begin(request_id, call, clock) if self._tracing else None
        if trace is None:
            return RequestMetrics(request_id, self._metrics, clock)
        return TracedRequest(request_id, self._metrics, clock, trace=trace)

    def close(self) -> None:
        """Send the remaining traces, which may take seconds."""
        if self._tracing is not None:
            self._tracing.close()

    def record_draft(self, seconds: float) -> None:
        """See StepRecorder."""
        self._metrics.record_draft(seconds)
        if self._tracing is not None:
            self._tracing.steps.add_draft(seconds)

    def record_verify(self, seconds: float) -> None:
        """See StepRecorder."""
        self._metrics.record_verify(seconds)
        if self._tracing is not None:
            self._tracing.steps.add_verify(seconds)

    def record_batch(self, num_sequences: int) -> None:
        """See StepRecorder."""
        self._metrics.record_batch(num_sequences)


def _tracing(config: ServeConfig, replica: str) -> Tracing | None:
    """Return None where traces are off; their packages are imported only if they are on."""
    if config.otlp_traces_endpoint is None:
        return None
    from cluster.replica.tracing import tracing_to

    return tracing_to(config.otlp_traces_endpoint, config.served_model_name, replica)
