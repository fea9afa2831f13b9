# Modules: cluster.cli.bench.backend
"""Requests under load against a fake backend, and the statistics of hand-made records."""

import threading
import time

import numpy as np
import pytest

from cluster.cli.bench.backend import RequestFailedError, StreamEvent, TokenUsage
from cluster.cli.bench.dataset import SampleRequest
from cluster.cli.bench.load import (
    RequestRecord,
    distribution,
    latency_ms,
    peak_concurrency,
    percentile,
    send_requests,
    summarize,
)
from specdec.types.reports.stats import SpeculationStats


class ScriptedBackend:
    """Streams two messages within `seconds`; prompts that begin with "fail" fail."""

    model = "tiny"

    def __init__(self, seconds=0.0):
        self.seconds = seconds
        self.num_open = self.most_open = 0
        self.is_closed = threading.Event()
        self._lock = threading.Lock()

    def stream(self, request):
        self._count(1)
        try:
            yield StreamEvent(has_tokens=False)
            self.is_closed.wait(self.seconds)
            if request.prompt.startswith("fail"):
                raise RequestFailedError(request.prompt)
            yield StreamEvent(has_tokens=True)
            usage = TokenUsage(4, 2) if request.prompt != "no usage" else None
            yield StreamEvent(has_tokens=True, usage=usage)
        finally:
            self._count(-1)

    def close(self):
        self.is_closed.set()

    def _count(self, change):
        with self._lock:
            self.num_open += change
            self.most_open = max(self.most_open, self.num_open)


def send(backend, prompts, due_s=None, max_concurrency=None):
    requests = [SampleRequest(prompt, 5) for prompt in prompts]
    due_s = due_s or [None] * len(requests)
    return send_requests(backend, requests, due_s, max_concurrency, lambda: None)


@pytest.mark.parametrize("limit", [1, 3])
def test_a_closed_loop_keeps_the_concurrency(limit):
    all_are_open = threading.Barrier(limit, timeout=30)

    class Together(ScriptedBackend):
        def stream(self, request):
            for event in super().stream(request):
                if not event.has_tokens:
                    all_are_open.wait()  # fails if fewer requests than the limit are open
                yield event

    backend = Together(seconds=0.01)
    records = send(backend, ["a"] * 9, max_concurrency=limit)
    assert backend.most_open == limit
    assert len(records) == 9
    assert {each.due_s for each in records} == {None}
    assert max(each.done_s for each in records) >= 0.01 * 9 / limit


def test_an_open_loop_sends_requests_when_due_however_many_are_open():
    all_are_open = threading.Barrier(3, timeout=30)

    class Slow(ScriptedBackend):
        def stream(self, request):
            all_are_open.wait()  # fails the test if a request waits for the end of another
            return super().stream(request)

    due_s = [0.05, 0.1, 0.15]
    for record, due in zip(send(Slow(), ["a"] * 3, due_s), due_s, strict=True):
        assert record.due_s == due
        assert due <= record.sent_s


def test_an_open_loop_with_a_limit_is_late():
    records = send(ScriptedBackend(seconds=0.1), ["a", "a"], [0.0, 0.0], max_concurrency=1)
    assert records[1].sent_s - records[1].due_s >= 0.1


def test_the_times_of_events():
    [record] = send(ScriptedBackend(seconds=0.02), ["a"])
    first_s, second_s = record.token_times_s
    assert record.sent_s + 0.02 <= first_s <= second_s <= record.done_s
    assert (record.usage, record.error) == (TokenUsage(4, 2), None)


def test_without_usage_messages_count_as_tokens():
    [record] = send(ScriptedBackend(), ["no usage"])
    assert record.usage == TokenUsage(0, 2)


def test_failures_are_recorded_and_other_requests_continue():
    records = send(ScriptedBackend(), ["a", "fail: full", "a"], max_concurrency=1)
    assert [each.error for each in records] == [None, "fail: full", None]
    assert records[1].usage is None


def test_an_interrupt_ends_all_requests():
    backend = ScriptedBackend(seconds=3600)

    def due():
        yield 0.0
        time.sleep(0.05)
        raise KeyboardInterrupt

    requests = [SampleRequest("a", 5)] * 2
    with pytest.raises(KeyboardInterrupt):
        send_requests(backend, requests, due(), None, lambda: None)
    assert backend.is_closed.is_set()
    assert backend.num_open == 0


def test_no_requests_no_records():
    assert send(ScriptedBackend(), []) == []


def test_progress_is_called_for_each_request():
    done = []
    requests = [SampleRequest("a", 5), SampleRequest("fail", 5)]
    send_requests(ScriptedBackend(), requests, [0.0, 0.0], 1, lambda: done.append(1))
    assert len(done) == 2


# Sent at 1 s, first token after 0.5 s, then after 0.2 and 0.3 s; 5 tokens, so 4 in 0.5 s.
FIRST = RequestRecord(1.0, 1.0, (1.5, 1.7, 2.0), 2.0, TokenUsage(10, 5, SpeculationStats(2, 6, 3)))
# Due at 1 s and sent 0.5 s later; one token after 0.1 s.
SECOND = RequestRecord(1.0, 1.5, (1.6,), 1.6, TokenUsage(20, 1, SpeculationStats(1, 2, 0)))
FAILED = RequestRecord(None, 3.0, (3.1,), 5.0, None, "UNAVAILABLE")


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (FIRST, {"ttft": [500], "tpot": [125], "itl": [200, 300], "e2el": [1000]}),
        (SECOND, {"ttft": [100], "tpot": [], "itl": [], "e2el": [100]}),
        (
            RequestRecord(0.0, 0.0, (), 0.25, TokenUsage(5, 0)),
            {"ttft": [], "tpot": [], "itl": [], "e2el": [250]},
        ),
    ],
)
def test_latencies_of_one_request(record, expected):
    for name, values in expected.items():
        assert latency_ms(record, name) == pytest.approx(values), name


def test_a_run_by_hand():
    summary = summarize([FIRST, SECOND, FAILED], [99], {})
    assert (summary.completed, summary.failed, summary.errors) == (2, 1, {"UNAVAILABLE": 1})
    assert summary.duration_s == 4.0  # from 1 s, when the first was sent, to 5 s
    assert (summary.total_input_tokens, summary.total_output_tokens) == (30, 6)
    assert summary.request_throughput == 0.5
    assert summary.output_throughput == 1.5
    assert summary.total_token_throughput == 9.0
    assert summary.request_goodput is None
    assert summary.peak_concurrency == 2
    assert summary.max_lateness_s == 0.5
    assert summary.latencies_ms["ttft"].mean == pytest.approx(300)
    assert summary.latencies_ms["ttft"].std == pytest.approx(200)
    assert summary.latencies_ms["ttft"].percentiles == pytest.approx({99: 496})
    assert summary.latencies_ms["itl"].median == pytest.approx(250)
    assert summary.speculation == SpeculationStats(3, 8, 3)


@pytest.mark.parametrize(
    ("objectives", "good"),
    [
        ({"ttft": 500.0}, 2),
        ({"ttft": 499.0}, 1),
        ({"ttft": 500.0, "tpot": 124.0}, 1),
        ({"itl": 250.0}, 2),
        ({"itl": 249.0}, 1),
        ({"e2el": 99.0}, 0),
    ],
)
def test_goodput_counts_requests_that_meet_every_objective(objectives, good):
    summary = summarize([FIRST, SECOND, FAILED], [], objectives)
    assert summary.request_goodput == good / 4


def test_a_run_in_which_all_requests_failed():
    summary = summarize([FAILED], [50], {"ttft": 1.0})
    assert (summary.completed, summary.failed, summary.request_throughput) == (0, 1, 0)
    assert summary.request_goodput == 0
    assert summary.latencies_ms == {}
    assert summary.speculation is None


def test_percentiles_equal_those_of_numpy():
    values = sorted([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0])
    for percent in (0, 12.5, 50, 90, 99.9, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))
    assert percentile([7.0], 99) == 7.0
    assert distribution(values, []).std == pytest.approx(np.std(values))


def test_peak_concurrency():
    def record(sent, done):
        return RequestRecord(sent, sent, (), done, None, "x")

    assert peak_concurrency([record(0, 1), record(1, 2)]) == 1
    assert peak_concurrency([record(0, 3), record(1, 2), record(1.5, 4)]) == 3
