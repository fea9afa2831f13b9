"""Steps in flight on several ranks, whose devices and hosts take different times.

The engine sends messages to ranks that are threads. What a rank has collected when a message
arrives is random; the collective operations of all ranks must be the same ones anyway.
"""

import queue
import random
import threading
from contextlib import contextmanager

import pytest

from cluster.workers.messages import serialization
from cluster.workers.rank.target_steps import TargetSteps
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.worker.device.input.buffers import PendingTokens
from specdec.worker.device.steps import DeviceSteps
from tests.specdec.attention_heads import fitted_head_dir
from tests.specdec.engines import engine_config, local_engine, make_engine, request, tokens_by
from tests.specdec.fakes import Exchange, ThreadGroup
from tests.specdec.worker.device.runners import FakeGraphs, device_runner

NUM_DRAFTS = 3
SIZES = {"max_num_seqs": 4, "max_model_len": 96}
TIMEOUT_S = 60
SAMPLING = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "presence_penalty": 0.4},
]


class RecordedGroup(ThreadGroup):
    """A rank that records the shapes of its collectives too."""

    def all_reduce(self, tensor):
        self.called.append(("shape", *tensor.shape))
        return super().all_reduce(tensor)


class ThreadedRanks:
    """Ranks that execute messages in threads, as a target; rank 0 answers.

    answers: of each rank. num_followed: answers to steps after which another one had begun.
    """

    def __init__(self, runners):
        self.most_ahead, self._num_sent, self.num_followed = 0, 0, 0
        self._inboxes = [queue.Queue() for _ in runners]
        self._answers = queue.Queue()
        self.answers = [[] for _ in runners]
        self._threads = [
            threading.Thread(target=self._run, args=(rank, runner), daemon=True)
            for rank, runner in enumerate(runners)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, step):
        for inbox in self._inboxes:
            inbox.put(serialization.encode_step(step))
        self._num_sent += 1
        self.most_ahead = max(self.most_ahead, self._num_sent)

    def collect(self):
        self._num_sent -= 1
        answer = self._answers.get(timeout=TIMEOUT_S)
        if isinstance(answer, BaseException):
            raise answer
        return serialization.decode_output(answer)

    def stop(self):
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self._threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()

    def _run(self, rank, runner):
        chance = random.Random(rank)
        local.is_done = lambda: chance.random() < 0.05
        inbox = self._inboxes[rank]

        def has_message():
            return not inbox.empty()

        steps = TargetSteps(runner, rank)
        try:
            while (frames := inbox.get(timeout=TIMEOUT_S)) is not None:
                for answer in steps(frames, has_message):
                    self.num_followed += runner.num_in_flight > 0
                    self._answer(rank, answer)
            for answer in steps.finish():
                self._answer(rank, answer)
        except BaseException as error:
            runner.group.exchange.abort()
            self._answers.put(error)

    def _answer(self, rank, answer):
        self.answers[rank].append(b"".join(answer))
        if rank == 0:
            self._answers.put(answer)


local = threading.local()


@pytest.fixture(autouse=True)
def begun(monkeypatch):
    """Return the steps that began on each device: their rows. What has ended is random."""
    monkeypatch.setattr(PendingTokens, "is_done", property(lambda _: local.is_done()))
    begun, begin = {}, DeviceSteps.begin

    def recorded(self, columns, states, num_kept=None):
        begun.setdefault(self, []).append(list(columns.rows))
        return begin(self, columns, states, num_kept)

    monkeypatch.setattr(DeviceSteps, "begin", recorded)
    return begun


def requests():
    return [
        request(f"r{i}", [5 + i, 6, 7 + 2 * i] * (2 + 3 * i), seed=i, **each)
        for i, each in enumerate(SAMPLING)
    ]


@contextmanager
def ranks_of(directory, config, size, *, head=None):
    exchange = Exchange(size)
    groups = [RecordedGroup(rank, size, exchange=exchange) for rank in range(size)]
    runners = [None] * size

    def load(rank):
        runners[rank] = device_runner(directory, config, FakeGraphs(), groups[rank], head=head)

    threads = [threading.Thread(target=load, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    for group in groups:
        group.called.clear()
    ranks = ThreadedRanks(runners)
    try:
        yield ranks, groups
    finally:
        ranks.stop()


def served(directory, config, begun, head=None):
    """Return the tokens of requests, served twice. The ranks have done the same."""
    with ranks_of(directory, config, 2, head=head) as (ranks, groups):
        engine = make_engine(directory, config, ranks)
        tokens = [tokens_by(engine, requests()) for _ in range(2)]
    assert ranks.most_ahead == 2
    assert ranks.num_followed > 5
    assert ranks.answers[0] == ranks.answers[1]
    first, second = begun.values()
    assert first == second
    assert groups[0].called == groups[1].called
    return tokens


@pytest.fixture(scope="module")
def expected(tiny_model_dir):
    return tokens_by(local_engine(tiny_model_dir, engine_config(0), kernels="torch"), requests())


@pytest.fixture(scope="module")
def head_dir(tiny_model_dir, tmp_path_factory, expected):
    """Return the directory of a head, some of whose drafts are right."""
    asked = requests()
    texts = [[*each.prompt, *expected[each.request_id]] for each in asked]
    lengths = [len(each.prompt) for each in asked]
    directory = tmp_path_factory.mktemp("head")
    return fitted_head_dir("eagle3", tiny_model_dir, directory, texts, lengths, depth=NUM_DRAFTS)


def test_ranks_make_the_same_collectives_whatever_they_have_collected(
    tiny_model_dir, expected, begun
):
    config = engine_config(0, async_scheduling=True, **SIZES)
    assert served(tiny_model_dir, config, begun) == [expected] * 2


def test_drafts_that_the_device_holds_have_one_shape_on_all_ranks(
    tiny_model_dir, expected, head_dir, begun
):
    """A pending row has room for the longest draft, and one whose draft is known only for that."""
    speculation = SpeculativeConfig.of("eagle3", NUM_DRAFTS, model=str(head_dir))
    config = engine_config(speculation=speculation, async_scheduling=True, **SIZES)
    assert served(tiny_model_dir, config, begun, head_dir) == [expected] * 2
