"""A trace of each request, by OpenTelemetry and its conventions for generative AI.

docs/tracing.md lists the spans. They are made when a request has ended, from a few recorded times:
there is no work per token. Spans contain no prompts or answers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import pairwise
from typing import NamedTuple

from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cluster.observability.metric_aliases import PROVIDER
from cluster.observability.request_context import text_headers
from specdec.types.network import bypasses_proxy
from specdec.types.responses import EngineOutput
from specdec.types.sampling.sampling_params import LOSSY_VERIFIERS, SamplingParams

logger = logging.getLogger(__name__)

PHASES = ("prepare", "queue", "prefill", "decode")
"""Child spans of a request's span, in sequence; the first begins at its arrival."""

DECODE_STEPS = "verify", "draft_ahead"
"""Spans of steps within the last phase, where drafts were made ahead."""

_MAX_OVERLAPS = 512
_MAX_SHOWN = 16
"""Steps of a trace that have spans, the latest: as many as show how both models work."""

_W3C = TraceContextTextMapPropagator()
_DIRECT = (("grpc.enable_http_proxy", 0),)
"""Option of a gRPC channel that uses no proxy."""

_FLUSH_S = 3.0

Attributes = dict[str, str | bool | int | float | list[str]]


class Interval(NamedTuple):
    """Begin and end, in seconds of the engine's clock."""

    began_at_s: float
    ended_at_s: float


class Overlap(NamedTuple):
    """A step of the target, and the draft model's passes for the step after it."""

    verify: Interval
    draft: Interval


@dataclass
class StepSeconds:
    """Seconds that the engine has spent on drafting and on verification.

    overlaps: the latest steps whose drafts were made during the step before.
    """

    draft_s: float = 0.0
    verify_s: float = 0.0
    overlaps: deque[Overlap] = field(
        default_factory=lambda: deque(maxlen=_MAX_OVERLAPS), compare=False
    )
    _verified: Interval | None = field(default=None, compare=False)

    def record_verify(self, seconds: float, ended_at_s: float) -> None:
        """Record a step of the target."""
        self.verify_s += seconds
        self._verified = Interval(ended_at_s - seconds, ended_at_s)

    def record_ahead(self, began_at_s: float, seconds: float) -> None:
        """Record drafts that were made during the last step."""
        if self._verified is not None:
            drafted = Interval(began_at_s, began_at_s + seconds)
            self.overlaps.append(Overlap(self._verified, drafted))


class Tracing:
    """Creates the traces of one replica and exports them in batches, on a separate thread."""

    def __init__(self, provider: TracerProvider, exporter: SpanExporter, model: str) -> None:
        """Use a provider that samples, and exports by `exporter`. model: the served model name."""
        self.steps = StepSeconds()
        self._provider = provider
        self._exporter = exporter
        self._tracer = provider.get_tracer("specdec", version("specdec"))
        self._model = model

    def begin(
        self,
        request_id: str,
        model: str,
        params: SamplingParams | None,
        clock: Callable[[], float],
        operation: str,
        arrived_at: float,
    ) -> RequestTrace:
        """Start the trace of a request at its arrival, under the caller's traceparent, if any.

        clock: of all times that the trace will receive.
        """
        parent = _W3C.extract(text_headers(_W3C.fields))
        attributes = _request_attributes(params)
        attributes |= {
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": model or self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.id": request_id,
        }
        return RequestTrace(self._tracer, parent, attributes, self.steps, clock, arrived_at)

    def close(self) -> None:
        """Export the remaining traces; give up after a few seconds without a collector.

        No thread of the exporter goes on then.
        """
        flush = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        flush.start()
        flush.join(_FLUSH_S)
        if flush.is_alive():
            logger.warning("the last traces were not sent within %g s", _FLUSH_S)
            self._exporter.shutdown()  # ends its retries
            flush.join(_FLUSH_S)


def tracing_to(endpoint: str, model: str, replica: str) -> Tracing:
    """Export to a collector by OTLP over gRPC: http:// is without TLS, https:// with it.

    Sampling, headers and batches are set by OpenTelemetry's own environment variables.
    """
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    resource = Resource.create(
        {SERVICE_NAME: "specdec", SERVICE_VERSION: version("specdec"), SERVICE_INSTANCE_ID: replica}
    )
    provider = TracerProvider(resource=resource)
    exporter = OTLPSpanExporter(
        endpoint=endpoint,
        insecure=endpoint.startswith("http://"),
        # gRPC's options may be numbers; the annotation has texts alone.
        channel_options=_DIRECT if bypasses_proxy(endpoint) else None,  # type: ignore[arg-type]
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider, exporter, model)


@dataclass
class RequestTrace:
    """Records the times of one request, by `clock`, and makes its spans at the end.

    parent: the caller's span, if there is one. steps: the engine's running totals.
    """

    tracer: Tracer
    parent: Context
    attributes: Attributes
    steps: StepSeconds
    clock: Callable[[], float]
    arrived_at: float
    _moments: list[float] = field(default_factory=list)  # when each phase began
    _spent: list[StepSeconds] = field(default_factory=list)  # of all requests until then
    _finish_reasons: dict[int, str] = field(default_factory=dict)  # by choice

    def __post_init__(self) -> None:
        self._epoch_ns = time.time_ns() - int(self.clock() * 1e9)
        self._begin_phase(self.arrived_at)

    def on_queued(self, seed: int) -> None:
        """Record that the request is preprocessed and sent to the engine."""
        self.attributes["gen_ai.request.seed"] = seed
        self._begin_phase(self.clock())

    def on_scheduled(self, at: float) -> None:
        """Record that it is in a batch for the first time."""
        self._begin_phase(at)

    def on_first_output(self, at: float) -> None:
        """Record the first token, of any choice."""
        while len(self._moments) < len(PHASES) - 1:  # skipped phases took no time
            self._begin_phase(at)
        self.attributes["gen_ai.response.time_to_first_chunk"] = at - self._moments[0]
        self._begin_phase(at)

    def on_choice_end(self, choice: int, finish_reason: str) -> None:
        """Record the end of a choice."""
        self._finish_reasons[choice] = finish_reason

    def end(self, at: float, last: EngineOutput | None, error_type: str | None = None) -> None:
        """Make the spans. last: the last output, if any. error_type: name of the error, if any."""
        if error_type is not None:
            self.attributes["error.type"] = error_type
        if self._finish_reasons:
            reasons = [reason for _, reason in sorted(self._finish_reasons.items())]
            self.attributes["gen_ai.response.finish_reasons"] = reasons
        if last is not None:
            self.attributes |= _usage_attributes(last)
        operation, served = (
            self.attributes[f"gen_ai.{name}"] for name in ("operation.name", "response.model")
        )
        span = self.tracer.start_span(
            f"{operation} {served}",
            self.parent,
            SpanKind.SERVER,
            self.attributes,
            start_time=self._ns(self._moments[0]),
        )
        if error_type is not None:
            span.set_status(StatusCode.ERROR)
        if span.is_recording():
            self._make_phases(set_span_in_context(span), at, last)
        span.end(self._ns(at))

    def _begin_phase(self, at: float) -> None:
        self._moments.append(at)
        self._spent.append(StepSeconds(self.steps.draft_s, self.steps.verify_s))

    def _make_phases(self, parent: Context, ended_at: float, last: EngineOutput | None) -> None:
        """Make a span for each phase reached; each ends where the next one begins."""
        bounds = pairwise([*self._moments, ended_at])
        spent = pairwise([*self._spent, self.steps])
        for name, (begin, end), (before, after) in zip(PHASES, bounds, spent, strict=False):
            attributes = dict(_step_attributes(name, before, after, last))
            span = self.tracer.start_span(
                name, parent, attributes=attributes, start_time=self._ns(begin)
            )
            if name == PHASES[-1]:
                self._make_steps(set_span_in_context(span), begin, end)
            span.end(self._ns(end))

    def _make_steps(self, parent: Context, begin: float, end: float) -> None:
        """Make spans of the last steps of a phase whose drafts were made ahead."""
        within = [
            each
            for each in tuple(self.steps.overlaps)
            if begin <= each.draft.began_at_s and each.verify.ended_at_s <= end
        ]
        for overlap in within[-_MAX_SHOWN:]:
            for name, interval in zip(DECODE_STEPS, overlap, strict=True):
                began_at_ns = self._ns(interval.began_at_s)
                span = self.tracer.start_span(name, parent, start_time=began_at_ns)
                span.end(self._ns(interval.ended_at_s))

    def _ns(self, at: float) -> int:
        return self._epoch_ns + int(at * 1e9)


def _request_attributes(params: SamplingParams | None) -> Attributes:
    """Return the attributes of an arriving request, without parameters left to the model."""
    given: Mapping[str, float | int | None] = (
        {}
        if params is None
        else {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "max_tokens": params.max_tokens,
            "frequency_penalty": params.frequency_penalty or None,
            "presence_penalty": params.presence_penalty or None,
            "choice.count": params.n,
        }
    )
    return {
        "gen_ai.provider.name": PROVIDER,
        **{f"gen_ai.request.{name}": value for name, value in given.items() if value is not None},
    }


def _usage_attributes(last: EngineOutput) -> Attributes:
    return {
        "gen_ai.usage.input_tokens": last.num_prompt_tokens,
        "gen_ai.usage.output_tokens": last.num_output_tokens,
        "specdec.verifier": last.verifier,
        "specdec.is_lossless": last.verifier not in LOSSY_VERIFIERS,
    }


def _step_attributes(
    phase: str, before: StepSeconds, after: StepSeconds, last: EngineOutput | None
) -> Iterator[tuple[str, int | float]]:
    """Yield the batch's seconds of drafting and verification in a phase, and counts of drafts."""
    if phase not in ("prefill", "decode"):
        return
    yield "specdec.draft_s", after.draft_s - before.draft_s
    yield "specdec.verify_s", after.verify_s - before.verify_s
    if phase == "decode" and last is not None:
        speculation = last.speculation
        yield "specdec.num_drafts", speculation.num_drafts
        yield "specdec.num_draft_tokens", speculation.num_draft_tokens
        yield "specdec.num_accepted_tokens", speculation.num_accepted_tokens
        yield "specdec.mean_acceptance_length", speculation.mean_acceptance_length
