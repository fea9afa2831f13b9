"""What a replica records of its steps and requests, with and without traces."""

import asyncio

import pytest

from cluster.config.serve_config import ServeConfig
from cluster.replica.instrumentation import ReplicaObserver
from specdec.engine.metrics import ABORTED, DRAFT_TIME, VERIFY_TIME, Metrics
from specdec.speculation.proposers import DraftRequest
from specdec.types.request import GenerateRequest
from specdec.types.sampling_params import SamplingParams


class Steps:
    """A target and a proposer that have nothing to say."""

    def begin(self, what):
        pass

    def collect(self):
        return []


class RecordingTracing:
    """Counts what it is told; `begin` gives a request no trace."""

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
    return ReplicaObserver(ServeConfig(otlp_traces_endpoint=endpoint), "r1", metrics)


def count_of(histogram):
    return sum(histogram.read().counts)


def test_steps_are_timed_for_metrics_and_traces(observer, metrics, tracing):
    target, proposer = observer.timed_target(Steps()), observer.timed_proposer(Steps())
    target.begin(None)
    target.collect()
    proposer.begin([DraftRequest(None, 2)])
    proposer.collect()
    assert (count_of(metrics[VERIFY_TIME]), count_of(metrics[DRAFT_TIME])) == (1, 1)
    if tracing is not None:
        assert (len(tracing.verifications), len(tracing.drafts)) == (1, 1)


def test_where_nothing_drafts_nothing_is_timed(observer):
    assert observer.timed_proposer(None) is None


def test_a_request_is_told_to_the_traces_and_its_end_to_the_metrics(observer, metrics, tracing):
    call = GenerateRequest((1, 2), SamplingParams())
    observer.begin("mine", call).on_broken_off(asyncio.CancelledError())
    assert metrics.ended[ABORTED] == 1
    if tracing is not None:
        assert tracing.calls == [("mine", call)]


def test_closing_sends_the_traces_that_are_left(observer, tracing):
    observer.close()
    assert tracing is None or tracing.is_closed
