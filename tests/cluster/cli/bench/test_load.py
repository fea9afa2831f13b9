"""The loop: how many are open at once, when they are sent, and what becomes of failures."""

import threading
import time

import pytest

from cluster.cli.bench.backend import Heard, RequestFailedError, TokenUsage
from cluster.cli.bench.load import ask_all
from cluster.cli.bench.questions import Question


class ScriptedBackend:
    """Takes `seconds` for an answer of two messages; prompts that are kinds of failure fail."""

    model = "tiny"

    def __init__(self, seconds=0.0):
        self.seconds = seconds
        self.num_open = self.most_open = 0
        self.is_closed = threading.Event()
        self._lock = threading.Lock()

    def ask(self, question):
        self._count(1)
        try:
            yield Heard(brings_tokens=False)
            self.is_closed.wait(self.seconds)
            if question.prompt.startswith("fail"):
                raise RequestFailedError(question.prompt)
            yield Heard(brings_tokens=True)
            usage = TokenUsage(4, 2) if question.prompt != "untold" else None
            yield Heard(brings_tokens=True, usage=usage)
        finally:
            self._count(-1)

    def close(self):
        self.is_closed.set()

    def _count(self, change):
        with self._lock:
            self.num_open += change
            self.most_open = max(self.most_open, self.num_open)


def ask(backend, prompts, due_s=None, max_concurrency=None):
    questions = [Question(prompt, 5) for prompt in prompts]
    due_s = due_s or [None] * len(questions)
    return ask_all(backend, questions, due_s, max_concurrency, lambda: None)


@pytest.mark.parametrize("most", [1, 3])
def test_a_closed_loop_keeps_so_many_open(most):
    backend = ScriptedBackend(seconds=0.03)
    records = ask(backend, ["a"] * 9, max_concurrency=most)
    assert backend.most_open == most
    assert len(records) == 9
    assert {each.due_s for each in records} == {None}
    assert max(each.done_s for each in records) >= 0.03 * 9 / most


def test_an_open_loop_sends_when_requests_are_due_whatever_is_open():
    all_are_open = threading.Barrier(3, timeout=30)

    class Slow(ScriptedBackend):
        def ask(self, question):
            all_are_open.wait()  # breaks, and fails the test, if one waits for another's end
            return super().ask(question)

    due_s = [0.05, 0.1, 0.15]
    for record, due in zip(ask(Slow(), ["a"] * 3, due_s), due_s, strict=True):
        assert record.due_s == due
        assert due <= record.sent_s


def test_an_open_loop_with_a_limit_is_late():
    records = ask(ScriptedBackend(seconds=0.1), ["a", "a"], [0.0, 0.0], max_concurrency=1)
    assert records[1].sent_s - records[1].due_s >= 0.1


def test_what_is_heard_when():
    [record] = ask(ScriptedBackend(seconds=0.02), ["a"])
    assert len(record.heard_s) == 2
    assert record.sent_s + 0.02 <= record.heard_s[0] <= record.heard_s[1] <= record.done_s
    assert (record.usage, record.error) == (TokenUsage(4, 2), None)


def test_messages_count_as_tokens_where_no_usage_is_told():
    [record] = ask(ScriptedBackend(), ["untold"])
    assert record.usage == TokenUsage(0, 2)


def test_failures_are_counted_and_the_others_go_on():
    records = ask(ScriptedBackend(), ["a", "fail: full", "a"], max_concurrency=1)
    assert [each.error for each in records] == [None, "fail: full", None]
    assert records[1].usage is None


def test_nobody_is_left_waiting_when_it_is_broken_off():
    backend = ScriptedBackend(seconds=60)
    began = time.monotonic()

    def due():
        yield 0.0
        time.sleep(0.05)
        raise KeyboardInterrupt

    questions = [Question("a", 5)] * 2
    with pytest.raises(KeyboardInterrupt):
        ask_all(backend, questions, due(), None, lambda: None)
    assert backend.is_closed.is_set()
    assert backend.num_open == 0
    assert time.monotonic() - began < 10


def test_no_questions_no_records():
    assert ask(ScriptedBackend(), []) == []


def test_progress_is_told_of_each():
    done = []
    questions = [Question("a", 5), Question("fail", 5)]
    ask_all(ScriptedBackend(), questions, [0.0, 0.0], 1, lambda: done.append(1))
    assert len(done) == 2
