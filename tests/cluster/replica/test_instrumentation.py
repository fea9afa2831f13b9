"""What a replica records of its steps and requests, with and without traces."""

import asyncio

import pytest

from cluster.config.serve_config import ServeConfig
from cluster.replica.instrumentation import Instrumentation
from specdec.engine.metrics import ABORTED, BATCH_SIZE, DRAFT_TIME, VERIFY_TIME, Metrics
from specdec.types.request import GenerateRequest
from specdec.types.sampling_params import SamplingParams


class RecordingTracing:
    """Counts what it records; `begin` gives a request no trace."""

    def __init__(self):
        self.steps = self
        self.drafts, self.verifications, self.calls = [], [], []
        self.is_closed = False

    def add_draft(self, seconds):
        self.drafts.append(seconds)

    def add_verify(self, seconds):
        self.verifications.append(seconds)

    def begin(self, request_id, call, clock):
        self.calls.append((request_id, call))

    def close(self):
        self.is_closed = True


@pytest.fixture
def metrics():
    return Metrics()


@pytest.fixture(params=[True, False], ids=["traced", "untraced"])
def tracing(request, monkeypatch):
    """None where no traces are wanted."""
    made = RecordingTracing() if request.param else None
    monkeypatch.setattr("cluster.replica.tracing.tracing_to", lambda endpoint, model, replica: made)
    return made


@pytest.fixture
def observer(metrics, tracing):
    endpoint = None if tracing is None else "http://localhost:4317"
    return Instrumentation(ServeConfig(otlp_traces_endpoint=endpoint), "r1", metrics)


def count_of(histogram):
    return sum(histogram.read().counts)


def test_steps_are_recorded_for_metrics_and_traces(observer, metrics, tracing):
    observer.record_verify(2.0)
    observer.record_draft(1.0)
    observer.record_batch(3)
    assert (metrics[VERIFY_TIME].read().total, metrics[DRAFT_TIME].read().total) == (2.0, 1.0)
    assert [count_of(metrics[each]) for each in (VERIFY_TIME, DRAFT_TIME, BATCH_SIZE)] == [1, 1, 1]
    if tracing is not None:
        assert (tracing.verifications, tracing.drafts) == ([2.0], [1.0])


def test_a_request_is_told_to_the_traces_and_its_end_to_the_metrics(observer, metrics, tracing):
    call = GenerateRequest((1, 2), SamplingParams())
    observer.begin("mine", call).on_broken_off(asyncio.CancelledError())
    assert metrics.ended[ABORTED] == 1
    if tracing is not None:
        assert tracing.calls == [("mine", call)]


def test_closing_sends_the_traces_that_are_left(observer, tracing):
    observer.close()
    assert tracing is None or tracing.is_closed
