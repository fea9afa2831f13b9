"""Traces, with an exporter into memory and with a collector."""

import asyncio
import time
from contextlib import aclosing
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient
from opentelemetry.trace import SpanKind, StatusCode

from cluster.api.base.authentication import ApiKeys
from cluster.api.grpc.servicers import InferenceServicer
from cluster.api.http.limits import HttpLimits
from cluster.api.http_app import HttpApp
from cluster.observability.request_context import current_headers, text_headers
from cluster.replica.instrumentation import TracedRequest
from cluster.replica.tracing import PHASES
from protos.specdec.v1 import inference_pb2 as pb
from specdec.engine.engine_thread import EngineThread
from specdec.engine.metrics.metrics import ABORTED, MAX_GENERATION_TOKENS, Metrics
from specdec.types.errors import NotReadyError, OverloadedError
from specdec.types.reports.stats import SpeculationStats
from specdec.types.responses import EngineOutput, FinishReason
from specdec.types.sampling.sampling_params import SamplingParams
from tests.clock import Clock
from tests.specdec.engines import HashTarget, ScriptedProposer, engine_config, make_engine, request

PROMPT = [11, 12, 13, 14, 11, 12]
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
PARAMS = SamplingParams(temperature=0.5, max_tokens=7)


@pytest.fixture
def headers():
    """Return a function that sets the headers of the current call."""
    token = current_headers.set(lambda: ())
    yield lambda **generated: current_headers.set(lambda: tuple(generated.items()))
    current_headers.reset(token)


def begun(tracing, clock=None, request_id="r"):
    """Return the trace of a completion for the served model."""
    clock = clock or Clock()
    return tracing.begin(request_id, "", PARAMS, clock, "text_completion", clock())


def spans(exporter):
    return {each.name: each for each in exporter.get_finished_spans()}


def output(finish_reason=None, choice=0):
    return EngineOutput(
        "r", (5, 6), "text", finish_reason, 12, 6, SpeculationStats(2, 6, 3), choice=choice
    )


def test_a_hand_worked_trace(tracing, exporter):
    clock = Clock(50.0)
    before_ns = time.time_ns()
    trace = begun(tracing, clock)
    clock.now_s = 50.25
    trace.on_queued(9)
    tracing.steps.verify_s += 4.0
    trace.on_scheduled(51.0)
    tracing.steps.draft_s += 0.5
    tracing.steps.verify_s += 0.75
    trace.on_first_output(52.0)
    tracing.steps.draft_s += 1.0
    tracing.steps.verify_s += 1.5
    trace.on_choice_end(1, "stop")
    trace.on_choice_end(0, "length")
    trace.end(55.0, output(FinishReason.STOP))

    made = spans(exporter)
    root = made.pop("text_completion tiny")
    assert tuple(made) == PHASES
    assert {name: seconds(span) for name, span in made.items()} == {
        "prepare": 0.25,
        "queue": 0.75,
        "prefill": 1.0,
        "decode": 3.0,
    }
    assert (root.kind, root.parent, seconds(root)) == (SpanKind.SERVER, None, 5.0)
    assert abs(root.start_time - before_ns) < 1e9
    assert {each.parent.span_id for each in made.values()} == {root.context.span_id}
    assert dict(root.attributes) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "specdec",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.seed": 9,
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": "r",
        "gen_ai.response.finish_reasons": ("length", "stop"),
        "gen_ai.response.time_to_first_chunk": 2.0,
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 6,
        "specdec.verifier": "coupled",
        "specdec.is_lossless": True,
    }
    assert dict(made["queue"].attributes) == {}
    assert dict(made["prefill"].attributes) == {"specdec.draft_s": 0.5, "specdec.verify_s": 0.75}
    assert dict(made["decode"].attributes) == {
        "specdec.draft_s": 1.0,
        "specdec.verify_s": 1.5,
        "specdec.num_drafts": 2,
        "specdec.num_draft_tokens": 6,
        "specdec.num_accepted_tokens": 3,
        "specdec.mean_acceptance_length": 2.5,
    }


def test_drafts_made_ahead_are_beside_the_steps_that_they_overlap(tracing, exporter):
    """Each of the latest steps has a span of the target and one of the draft model."""
    clock = Clock(50.0)
    trace = begun(tracing, clock)
    tracing.steps.record_ahead(48.0, 1.0)  # before any step
    tracing.steps.record_verify(1.0, 49.0)
    tracing.steps.record_ahead(48.5, 1.0)  # of another request
    trace.on_queued(9)
    trace.on_scheduled(51.0)
    trace.on_first_output(52.0)
    for step in range(20):
        tracing.steps.record_verify(0.5, 53.0 + step)
        tracing.steps.record_ahead(52.6 + step, 0.25)
    trace.end(80.0, output(FinishReason.STOP))
    made = exporter.get_finished_spans()
    [decode] = [each for each in made if each.name == "decode"]
    for name, begin, length in (("verify", 52.5, 0.5), ("draft_ahead", 52.6, 0.25)):
        own = [each for each in made if each.name == name]
        assert {each.parent.span_id for each in own} == {decode.context.span_id}
        assert [round(seconds(each), 3) for each in own] == [length] * 16
        after_s = (own[0].start_time - decode.start_time) / 1e9
        assert round(after_s, 3) == round(begin + 4 - 52.0, 3), "the latest sixteen"


def seconds(span):
    return round((span.end_time - span.start_time) / 1e9, 6)


def test_a_request_that_was_refused_ends_in_its_first_phase(tracing, exporter):
    clock = Clock()
    trace = tracing.begin("r", "other", None, clock, "chat", clock() - 2.0)
    measured = TracedRequest("r", Metrics(), Clock(), trace=trace)
    measured.on_refused(OverloadedError("full"), 1)
    made = spans(exporter)
    assert list(made) == ["prepare", "chat tiny"]
    root = made["chat tiny"]
    assert seconds(made["prepare"]) == seconds(root) == 2.0, "from its arrival on"
    assert root.status.status_code is StatusCode.ERROR
    assert root.attributes["error.type"] == "OverloadedError"
    assert root.attributes["gen_ai.request.model"] == "other"
    assert "gen_ai.usage.input_tokens" not in root.attributes


@pytest.mark.parametrize(
    ("generated", "is_child", "is_made"),
    [
        ({"traceparent": TRACEPARENT}, True, True),
        ({"TraceParent": TRACEPARENT}, True, True),
        ({"traceparent": TRACEPARENT.encode(), "tracestate": b"vendor=1"}, True, True),
        ({"traceparent": TRACEPARENT.removesuffix("1") + "0"}, True, False),
        ({"traceparent": "00-nonsense-01"}, False, True),
        ({}, False, True),
    ],
)
def test_it_continues_the_callers_trace(tracing, exporter, headers, generated, is_child, is_made):
    headers(**generated)
    begun(tracing).end(101.0, None)
    made = spans(exporter)
    assert bool(made) == is_made, "the caller's decision to sample was not respected"
    for span in made.values():
        assert (format(span.context.trace_id, "032x") == TRACE_ID) == is_child
    if is_made and is_child:
        root = made["text_completion tiny"]
        assert format(root.parent.span_id, "016x") == PARENT_ID
        assert dict(root.context.trace_state) == (
            {"vendor": "1"} if "tracestate" in generated else {}
        )


class SlowTarget(HashTarget):
    """Target whose steps take time, so that each output is delivered before the next step."""

    def collect(self):
        time.sleep(0.002)
        return super().collect()


class TracedSteps(Metrics):
    """Records steps for traces alone."""

    def __init__(self, tracing):
        super().__init__()
        self.steps = tracing.steps

    def record_draft(self, seconds):
        self.steps.draft_s += seconds

    def record_verify(self, seconds):
        self.steps.record_verify(seconds, time.perf_counter())

    def record_ahead(self, began_at_s, seconds):
        self.steps.record_ahead(began_at_s, seconds)


class Replica:
    """Engine whose drafts are accepted, with its loop and traces of requests."""

    def __init__(self, directory, tracing):
        target = SlowTarget(block_size=4, vocab_size=383)
        proposer = ScriptedProposer(target.continuation)
        engine = make_engine(
            directory,
            engine_config(3),
            target,
            proposer,
            recorder=TracedSteps(tracing),
        )
        self.tracing = tracing
        self.metrics = Metrics()
        self.loop = EngineThread(engine)

    def generate(self, each):
        clock = time.perf_counter
        trace = begun(self.tracing, clock, each.request_id)
        measured = TracedRequest(each.request_id, self.metrics, clock, trace=trace)
        measured.on_queued(each.params, each.seed)
        return self.loop.generate(each, measured)


@pytest.fixture
async def replica(tiny_model_dir, tracing):
    replica = Replica(tiny_model_dir, tracing)
    yield replica
    await replica.loop.close()


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_an_answer_makes_five_spans_however_long_it_is(
    replica, unjoined, exporter, num_choices
):
    asked = request("r", PROMPT, max_tokens=60, n=num_choices)
    outputs = [each async for each in replica.generate(asked)]
    assert len(outputs) >= 15 * num_choices
    made = spans(exporter)
    assert len(exporter.get_finished_spans()) == len(made) == 5
    assert tuple(made)[:4] == PHASES
    root = made["text_completion tiny"]
    assert root.attributes["gen_ai.response.finish_reasons"] == ("length",) * num_choices
    assert root.attributes["gen_ai.usage.output_tokens"] == 60 * num_choices
    decode = made["decode"].attributes
    assert decode["specdec.num_accepted_tokens"] == outputs[-1].speculation.num_accepted_tokens > 0
    assert decode["specdec.draft_s"] > 0
    longest_s = seconds(made["prefill"]) + seconds(made["decode"])  # a step may begin in the former
    assert 0.01 < decode["specdec.verify_s"] < longest_s


async def test_single_tokens_are_not_recorded(replica, unjoined, monkeypatch):
    recorded = []
    for name in ("on_queued", "on_scheduled", "on_first_output", "on_choice_end", "end"):
        method = getattr(begun(replica.tracing), name).__func__

        def record(self, *arguments, name=name, method=method):
            recorded.append(name)
            return method(self, *arguments)

        monkeypatch.setattr(f"cluster.replica.tracing.RequestTrace.{name}", record)
    async for _ in replica.generate(request("r", PROMPT, max_tokens=60)):
        pass
    assert recorded == ["on_queued", "on_scheduled", "on_first_output", "on_choice_end", "end"]


async def test_a_cancelled_stream_ends_the_trace(replica, exporter):
    async with aclosing(replica.generate(request("r", PROMPT, max_tokens=100))) as outputs:
        await anext(outputs)
    made = spans(exporter)
    assert tuple(made)[:4] == PHASES
    assert made["text_completion tiny"].attributes["error.type"] == "abort"


async def test_closing_after_the_last_output_records_no_second_end(replica, exporter, caplog):
    caplog.set_level("INFO", "specdec.engine.metrics.request_metrics")
    async with aclosing(replica.generate(request("r", PROMPT, max_tokens=20))) as outputs:
        await anext(outputs)
        while replica.loop.num_streams:  # the rest is delivered without a reader
            await asyncio.sleep(0.01)
    assert replica.metrics.ended == {"length": 1} | {
        reason: 0 for reason in replica.metrics.ended if reason != "length"
    }
    assert [each.finish_reason for each in caplog.records] == ["length"]
    assert len(exporter.get_finished_spans()) == 5
    assert "error.type" not in spans(exporter)["text_completion tiny"].attributes


async def test_a_request_refused_while_draining_is_traced_and_logged(replica, exporter, caplog):
    caplog.set_level("INFO", "specdec.engine.metrics.request_metrics")
    await replica.loop.drain(1)
    with pytest.raises(NotReadyError):
        await anext(replica.generate(request("r", PROMPT)))
    assert [each.finish_reason for each in caplog.records] == ["NotReadyError"]
    assert spans(exporter)["text_completion tiny"].attributes["error.type"] == "NotReadyError"
    assert replica.loop.num_streams == 0


def test_the_usage_of_a_resumed_request_is_what_it_generated(tracing, exporter):
    measured = TracedRequest("r", Metrics(), Clock(), trace=begun(tracing))
    measured.on_queued(SamplingParams(), 9)
    measured.on_resumed(4)
    measured.on_output(output(FinishReason.STOP)._replace(is_last=True), 101.0)
    assert spans(exporter)["text_completion tiny"].attributes["gen_ai.usage.output_tokens"] == 2


def test_a_reader_may_end_a_request_before_the_engine(tracing, exporter):
    metrics = Metrics()
    measured = TracedRequest("r", metrics, Clock(), trace=begun(tracing))
    measured.on_queued(SamplingParams(n=2), 9)
    measured.on_output(output(), 101.0)
    measured.on_output(output(FinishReason.LENGTH, choice=1), 101.0)
    end = output(FinishReason.STOP)._replace(num_output_tokens=3)
    for is_last in (False, True, True):
        measured.on_choice_end(end._replace(is_last=is_last), 2)
    measured.on_broken_off(GeneratorExit())
    assert (metrics.ended["stop"], metrics.ended[ABORTED]) == (1, 0)
    assert metrics[MAX_GENERATION_TOKENS].read().total == 2
    root = spans(exporter)["text_completion tiny"]
    assert root.attributes["gen_ai.response.finish_reasons"] == ("stop", "length")
    assert root.attributes["gen_ai.usage.output_tokens"] == 3
    assert "error.type" not in root.attributes


def test_a_request_cancelled_during_preprocessing_is_counted(tracing, exporter):
    metrics = Metrics()
    measured = TracedRequest("r", metrics, Clock(), trace=begun(tracing))
    measured.on_refused(asyncio.CancelledError(), 1)
    assert metrics.ended[ABORTED] == 1
    assert spans(exporter)["text_completion tiny"].attributes["error.type"] == ABORTED


def test_http_headers_are_available_in_a_request():
    app = HttpApp(HttpLimits, {})

    @app.get("/")
    async def answer():
        return text_headers(["traceparent", "tracestate"])

    with TestClient(app) as client:
        generated = {"TraceParent": TRACEPARENT, "authorization": "Bearer secret"}
        assert client.get("/", headers=generated).json() == {"traceparent": TRACEPARENT}
        assert client.get("/").json() == {}
        repeated = [("tracestate", "a=1"), ("TraceState", "b=2,c=3")]
        assert client.get("/", headers=repeated).json() == {"tracestate": "a=1,b=2,c=3"}
        equal = [("traceparent", TRACEPARENT)] * 2
        assert client.get("/", headers=equal).json() == {"traceparent": TRACEPARENT}


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_grpc_metadata_is_available_in_a_request(method):
    seen = []

    async def generate(call):
        seen.append(text_headers(["traceparent"]))
        raise OverloadedError("full")

    router = SimpleNamespace(
        generate=generate,
        max_tokens=lambda params: 1,
        metrics=SimpleNamespace(count_failure=lambda code: None),
    )
    context = SimpleNamespace(
        invocation_metadata=lambda: (("traceparent", TRACEPARENT), ("other", "value")),
        peer=lambda: "",
        set_code=lambda code: None,
        set_details=lambda details: None,
        set_trailing_metadata=lambda metadata: None,
    )
    servicer = InferenceServicer(router, ApiKeys())
    answer = getattr(servicer, method)(pb.GenerateRequest(text="a"), context)
    if method == "Generate":
        await answer
    else:
        assert [each async for each in answer] == []
    assert seen == [{"traceparent": TRACEPARENT}]
