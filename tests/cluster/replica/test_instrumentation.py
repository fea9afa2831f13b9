"""Measurements of steps and requests, with and without traces."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from cluster.config.serve_config import ServeConfig
from cluster.replica.instrumentation import Instrumentation
from cluster.replica.tracing import StepSeconds
from specdec.engine.metrics.metrics import (
    ABORTED,
    BATCH_SIZE,
    CHAT,
    DRAFT_TIME,
    ITERATION_TOKENS,
    REQUEST_DURATION,
    VERIFY_TIME,
    Metrics,
)
from specdec.types.sampling.sampling_params import SamplingParams


class RecordingTracing:
    """Tracing that records requests and the ends of their traces."""

    def __init__(self):
        self.steps = StepSeconds()
        self.calls, self.ended = [], []
        self.is_closed = False

    def begin(self, request_id, model, params, clock, operation, arrived_at):
        self.calls.append((request_id, model, params, operation, arrived_at))
        return SimpleNamespace(end=lambda at, last, error_type: self.ended.append(error_type))

    def close(self):
        self.is_closed = True


@pytest.fixture
def metrics():
    return Metrics()


@pytest.fixture(params=[True, False], ids=["traced", "untraced"])
def tracing(request, monkeypatch):
    """Return None where traces are off."""
    made = RecordingTracing() if request.param else None
    monkeypatch.setattr("cluster.replica.tracing.tracing_to", lambda endpoint, model, replica: made)
    return made


@pytest.fixture
def instrumentation(metrics, tracing):
    endpoint = None if tracing is None else "http://localhost:4317"
    return Instrumentation(ServeConfig(otlp_traces_endpoint=endpoint), "r1", metrics)


def count_of(histogram):
    return sum(histogram.read().counts)


def test_steps_are_recorded_for_metrics_and_traces(instrumentation, metrics, tracing):
    instrumentation.record_verify(2.0)
    instrumentation.record_ahead(time.perf_counter() - 1.5, 0.5)
    instrumentation.record_draft(1.0)
    for num_tokens in (5, 7):
        instrumentation.record_batch(3, num_tokens)
    assert (metrics[VERIFY_TIME].read().total, metrics[DRAFT_TIME].read().total) == (2.0, 1.0)
    assert [count_of(metrics[each]) for each in (VERIFY_TIME, DRAFT_TIME, BATCH_SIZE)] == [1, 1, 2]
    assert metrics[ITERATION_TOKENS].read().total == 7
    if tracing is not None:
        assert tracing.steps == StepSeconds(draft_s=1.0, verify_s=2.0)
        [overlap] = tracing.steps.overlaps
        assert overlap.verify.began_at_s < overlap.draft.began_at_s
        assert overlap.draft.ended_at_s < overlap.verify.ended_at_s


def test_requests_are_recorded_for_metrics_and_traces(instrumentation, metrics, tracing):
    params = SamplingParams(max_tokens=3)
    measured = instrumentation.begin("mine", "m", params, CHAT, 9.0)
    measured.on_broken_off(asyncio.CancelledError())
    assert metrics.ended[ABORTED] == 1
    [(operation, durations)] = metrics.server_latencies[REQUEST_DURATION].items()
    assert (operation, list(durations)) == ("chat", [ABORTED])
    if tracing is not None:
        assert (tracing.calls, tracing.ended) == ([("mine", "m", params, CHAT, 9.0)], [ABORTED])


def test_closing_exports_the_remaining_traces(instrumentation, tracing):
    instrumentation.close()
    assert tracing is None or tracing.is_closed
