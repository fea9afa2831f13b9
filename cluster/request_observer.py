"""Times one request from its arrival to its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from cluster.metrics import ABORTED, Metrics
from specdec.engine import RequestOutput


class RequestObserver:
    """Told of each output when the engine delivers it, however slowly a client reads.

    Inter-token latency is recorded as vLLM does it: one observation an output, the time since the
    one before, whether it brought one token or, with speculation, several. So it
    measures the pauses that a reader sees; the time per token is its sum by the tokens generated.
    """

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.perf_counter) -> None:
        """Made when the request arrives. `clock` must be the one of `on_output`'s times."""
        self._metrics = metrics
        self._arrived_at = clock()
        self._last_at: float | None = None

    def on_output(self, output: RequestOutput, at: float) -> None:
        """Records an output that was delivered at this time."""
        if self._last_at is None:
            self._metrics.time_to_first_token.observe(at - self._arrived_at)
        else:
            self._metrics.inter_token_latency.observe(at - self._last_at)
        self._last_at = at
        if output.finish_reason is not None:
            self._metrics.request_latency.observe(at - self._arrived_at)
            self._metrics.count_end(output.finish_reason.value)

    def on_broken_off(self, error: BaseException | None) -> None:
        """Records a request that ended before its last output; errors are counted where told."""
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            self._metrics.count_end(ABORTED)
