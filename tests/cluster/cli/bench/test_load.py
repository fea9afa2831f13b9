"""The load generator: concurrency, arrival times and failures."""

import threading
import time

import pytest

from cluster.cli.bench.backend import RequestFailedError, StreamEvent, TokenUsage
from cluster.cli.bench.dataset import SampleRequest
from cluster.cli.bench.load import send_requests


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
    backend = ScriptedBackend(seconds=0.03)
    records = send(backend, ["a"] * 9, max_concurrency=limit)
    assert backend.most_open == limit
    assert len(records) == 9
    assert {each.due_s for each in records} == {None}
    assert max(each.done_s for each in records) >= 0.03 * 9 / limit


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
    backend = ScriptedBackend(seconds=60)
    start = time.monotonic()

    def due():
        yield 0.0
        time.sleep(0.05)
        raise KeyboardInterrupt

    requests = [SampleRequest("a", 5)] * 2
    with pytest.raises(KeyboardInterrupt):
        send_requests(backend, requests, due(), None, lambda: None)
    assert backend.is_closed.is_set()
    assert backend.num_open == 0
    assert time.monotonic() - start < 10


def test_no_requests_no_records():
    assert send(ScriptedBackend(), []) == []


def test_progress_is_called_for_each_request():
    done = []
    requests = [SampleRequest("a", 5), SampleRequest("fail", 5)]
    send_requests(ScriptedBackend(), requests, [0.0, 0.0], 1, lambda: done.append(1))
    assert len(done) == 2
