"""Metrics and, where enabled, traces of a replica's requests and steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from cluster.config.serve_config import ServeConfig
from specdec.engine.metrics.metrics import TEXT_COMPLETION, Metrics
from specdec.engine.metrics.request_metrics import LEFT, RequestMetrics, reason_of
from specdec.types.responses import EngineOutput
from specdec.types.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:  # the packages that make traces are optional
    from cluster.replica.tracing import RequestTrace, Tracing


class Instrumentation:
    """Makes the measurements of each request, and records those of the engine's steps."""

    def __init__(self, config: ServeConfig, replica: str, metrics: Metrics) -> None:
        """replica: its name in traces. metrics: the metrics of the replica."""
        self._metrics = metrics
        self._tracing: Tracing | None = None
        if config.otlp_traces_endpoint is not None:
            from cluster.replica.tracing import tracing_to  # its packages are optional

            endpoint, model = config.otlp_traces_endpoint, config.served_model_name
            self._tracing = tracing_to(endpoint, model, replica)

    def begin(
        self,
        request_id: str,
        model: str,
        params: SamplingParams | None,
        operation: str,
        arrived_at: float,
    ) -> RequestMetrics:
        """Return the measurements of a request; they never get its prompt.

        params: None for one that was refused before they were known.
        """
        clock = time.perf_counter
        if self._tracing is None:
            return RequestMetrics(request_id, self._metrics, clock, operation, arrived_at)
        trace = self._tracing.begin(request_id, model, params, clock, operation, arrived_at)
        metrics = self._metrics
        return TracedRequest(request_id, metrics, clock, operation, arrived_at, trace=trace)

    def close(self) -> None:
        """Send the remaining traces, which may take seconds."""
        if self._tracing is not None:
            self._tracing.close()

    def record_draft(self, seconds: float) -> None:
        """See StepRecorder."""
        self._metrics.record_draft(seconds)
        if self._tracing is not None:
            self._tracing.steps.draft_s += seconds

    def record_verify(self, seconds: float) -> None:
        """See StepRecorder."""
        self._metrics.record_verify(seconds)
        if self._tracing is not None:
            self._tracing.steps.record_verify(seconds, time.perf_counter())

    def record_ahead(self, began_at_s: float, seconds: float) -> None:
        """See StepRecorder."""
        self._metrics.record_ahead(began_at_s, seconds)
        if self._tracing is not None:
            self._tracing.steps.record_ahead(began_at_s, seconds)

    def record_batch(self, num_sequences: int, num_tokens: int) -> None:
        """See StepRecorder."""
        self._metrics.record_batch(num_sequences, num_tokens)


class TracedRequest(RequestMetrics):
    """RequestMetrics that also records a trace."""

    def __init__(
        self,
        request_id: str,
        metrics: Metrics,
        clock: Callable[[], float] = time.perf_counter,
        operation: str = TEXT_COMPLETION,
        arrived_at: float | None = None,
        *,
        trace: RequestTrace,
    ) -> None:
        """trace: uses the same clock."""
        super().__init__(request_id, metrics, clock, operation, arrived_at)
        self._trace = trace

    def on_queued(self, params: SamplingParams, seed: int) -> None:
        """See RequestMetrics."""
        super().on_queued(params, seed)
        self._trace.on_queued(seed)

    def on_scheduled(self, at: float) -> None:
        """See RequestMetrics."""
        super().on_scheduled(at)
        self._trace.on_scheduled(at)

    def on_output(self, output: EngineOutput, at: float) -> None:
        """See RequestMetrics."""
        is_first = self.first_at is None
        super().on_output(output, at)
        if is_first:
            self._trace.on_first_output(at)
        self._trace_end(output, at)

    def on_choice_end(self, output: EngineOutput, longest: int) -> None:
        """See RequestMetrics."""
        if not self._has_ended:
            super().on_choice_end(output, longest)
            self._trace_end(output, self._clock())

    def _trace_end(self, output: EngineOutput, at: float) -> None:
        if output.finish_reason is not None:
            self._trace.on_choice_end(output.choice, output.finish_reason.value)
            if output.is_last:
                self._trace.end(at, self.latest)

    def on_broken_off(self, error: BaseException | None) -> None:
        """See RequestMetrics."""
        if not self._has_ended:
            super().on_broken_off(error)
            self._trace.end(self._clock(), self.latest, reason_of(error))

    def on_refused(self, error: BaseException, num_choices: int) -> None:
        """See RequestMetrics."""
        if not self._has_ended:
            super().on_refused(error, num_choices)
            if not isinstance(error, LEFT):
                self._trace.end(self._clock(), self.latest, reason_of(error))
