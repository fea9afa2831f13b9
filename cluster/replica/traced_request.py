"""Measurements and trace of one request."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from specdec.engine.metrics import Metrics
from specdec.engine.request_metrics import LEFT, RequestMetrics, reason_of
from specdec.sequences.sequence import EngineRequest
from specdec.types.outputs import EngineOutput

if TYPE_CHECKING:  # the packages that make traces are optional
    from cluster.replica.tracing import RequestTrace


class TracedRequest(RequestMetrics):
    """RequestMetrics that also records a trace."""

    def __init__(
        self,
        request_id: str,
        metrics: Metrics,
        clock: Callable[[], float] = time.perf_counter,
        *,
        trace: RequestTrace,
    ) -> None:
        """See RequestMetrics. trace: goes by the same clock."""
        super().__init__(request_id, metrics, clock)
        self._trace = trace

    def on_queued(self, request: EngineRequest) -> None:
        """See RequestMetrics."""
        super().on_queued(request)
        self._trace.on_queued(request)

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
        if output.finish_reason is not None:
            self._trace.on_choice_end(output.choice, output.finish_reason.value)
            if output.is_last:
                self._trace.end(at, output)

    def on_broken_off(self, error: BaseException | None) -> None:
        """See RequestMetrics."""
        if not self._has_ended:
            super().on_broken_off(error)
            self._trace.end(self._clock(), self._last, reason_of(error))

    def on_refused(self, error: BaseException) -> None:
        """See RequestMetrics."""
        super().on_refused(error)
        if not isinstance(error, LEFT):
            self._trace.end(self._clock(), self._last, reason_of(error))
