"""Requests from their arrival on, with their measurements."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

from cluster.observability.request_context import current_caller
from cluster.replica.instrumentation import Instrumentation
from specdec.engine.metrics.request_metrics import RequestMetrics
from specdec.engine.requests.preparations import Preparation
from specdec.types.request import GenerateRequest
from specdec.types.responses import EngineOutput
from specdec.types.sampling.sampling_params import SamplingParams


class Arrival(Preparation):
    """A request that has arrived, with what its measurements begin with.

    It is entered for each part of the preparation. An error that leaves the context refuses the
    request, and is measured.
    """

    def __init__(
        self,
        request_ids: Sequence[str],
        model: str,
        operation: str,
        num_choices: int,
        among: WeakSet[Preparation],
        instrumentation: Instrumentation,
    ) -> None:
        """operation: CHAT or TEXT_COMPLETION. num_choices: of all prompts."""
        super().__init__(*request_ids, caller=current_caller.get(), among=among)
        self._arrived_at = time.perf_counter()
        self._model, self._operation, self._num_choices = model, operation, num_choices
        self._instrumentation = instrumentation
        self._measured: RequestMetrics | None = None
        self.may_expire = True
        """True if a wait in the queue is limited."""

    def measure(self, request_id: str, model: str, params: SamplingParams) -> RequestMetrics:
        """Return the measurements of the call that the request has become."""
        self._measured = self._begin(request_id, model, params)
        return self._measured

    def on_choice_end(self, output: EngineOutput, longest: int) -> None:
        """See RequestMetrics."""
        assert self._measured is not None, "an output of no call"
        self._measured.on_choice_end(output, longest)

    def part(self, call: GenerateRequest, *, is_first: bool) -> Arrival:
        """Return the arrival of one of several calls that the request has become.

        The calls after the first one do not expire: that one was accepted before them, and what it
        and others have computed would be lost.
        """
        asked = (call.request_id,), call.model, self._operation, call.params.n
        part = Arrival(*asked, self._among, self._instrumentation)
        part._arrived_at, part.may_expire = self._arrived_at, is_first
        return part

    def __exit__(self, kind: type[BaseException] | None, *details: Any) -> None:
        if kind is not None:
            measured = self._measured or self._begin(self.request_ids[0], self._model, None)
            measured.on_refused(details[0], self._num_choices)
        super().__exit__(kind)

    def _begin(self, request_id: str, model: str, params: SamplingParams | None) -> RequestMetrics:
        begin, operation = self._instrumentation.begin, self._operation
        return begin(request_id, model, params, operation, self._arrived_at)
