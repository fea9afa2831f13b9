"""The step loop of a rank, without Ray and without a model."""

import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.observability.logs import LogConfig
from cluster.workers.group_spec import GroupSpec, ModelSource, Peers, RankPlace
from cluster.workers.messages import serialization
from cluster.workers.rank.actor import TargetWorker
from cluster.workers.transport.unix_socket import PeerGoneError, UnixSocket
from specdec.config.engine import EngineConfig
from specdec.types.messages import StepInput, VerifyOutput

PEERS = Peers(2)


class Socket:
    """Socket that delivers prepared messages and records what is sent."""

    def __init__(self, messages):
        self.messages = list(messages)
        self.sent = []

    def receive(self):
        if not self.messages:
            raise PeerGoneError("the Router has ended")
        return self.messages.pop(0)

    def send(self, frames):
        self.sent.append(frames)


class Rank:
    """Model that answers steps with their ID only, and fails in some."""

    def __init__(self, failing=()):
        self.failing = failing
        self.ran = []

    def run(self, frames, has_message):
        step_id = serialization.decode_step(frames).step_id
        self.ran.append(step_id)
        if step_id in self.failing:
            raise MemoryError("no room")
        yield serialization.encode_output(VerifyOutput(step_id, ()))


def step(step_id):
    return serialization.encode_step(StepInput(step_id, (), (), (), ()))


@pytest.fixture
def rank_of(tmp_path, monkeypatch):
    def rank_of(rank, replaces=None):
        limits = EngineConfig(max_model_len=16, num_blocks=1)
        spec = GroupSpec(
            "target", ModelSource(str(tmp_path), Path(tmp_path)), "float32", "cpu", None, "auto",
            2, limits, 1, (1, 1), None, 60.0, 60.0, LogConfig(),
        )  # fmt: skip
        monkeypatch.setattr("cluster.workers.rank.actor.logs.configure", lambda config: None)
        context = SimpleNamespace(get_node_id=lambda: "a")
        monkeypatch.setattr("cluster.workers.rank.actor.ray.get_runtime_context", lambda: context)
        return TargetWorker(spec, rank, tmp_path, replaces)

    return rank_of


@pytest.fixture
def ran(rank_of, monkeypatch):
    def run(messages, rank=0, failing=()):
        """Return the executed steps and the socket, at the stop or the loss of the peer."""
        worker = rank_of(rank)
        socket, model = Socket(messages), Rank(failing)
        worker._listener = SimpleNamespace(accept=lambda: socket, close=lambda: None)
        monkeypatch.setattr(worker, "_load", lambda peers: model)
        worker.run(PEERS)
        return model.ran, socket

    return run


def test_steps_are_run_in_order_until_the_stop(ran):
    steps, socket = ran([step(1), step(2), serialization.STOP, step(3)])
    assert steps == [1, 2]
    assert [serialization.decode_output(frames).step_id for frames in socket.sent] == [1, 2]


def test_only_the_first_rank_answers(ran):
    steps, socket = ran([step(1), serialization.STOP], rank=1)
    assert (steps, socket.sent) == ([1], [])


@pytest.mark.parametrize("rank", [0, 1])
def test_no_step_is_executed_after_one_that_failed(ran, rank):
    """Its peers may be in another step, and collective operations would mix both."""
    steps, socket = ran([step(1), step(2), step(3)], rank, failing={1})
    assert steps == [1]
    assert [serialization.error_in(frames) for frames in socket.sent] == ["MemoryError: no room"]
    assert socket.messages == [], "it stopped reading"


@pytest.mark.parametrize("error", [None, ValueError("no weights")])
def test_connections_with_other_ranks_outlive_an_error_of_this_one(rank_of, monkeypatch, error):
    """Otherwise the others report that this rank has ended, before its own error arrives."""
    worker, calls = rank_of(0), []

    def load(peers):
        if error is not None:
            raise error
        return Rank()

    worker._socket = Socket([serialization.STOP])
    worker._listener = SimpleNamespace(close=lambda: calls.append("listener"))
    worker._peers = SimpleNamespace(close=lambda: calls.append("peers"))
    monkeypatch.setattr(worker, "_load", load)
    with pytest.raises(ValueError, match="no weights") if error else nullcontext():
        worker.run(PEERS)
    assert calls == (["listener"] if error else ["listener", "peers"])


@pytest.fixture
def lost():
    """The process of a lost rank, which has not ended yet."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def spare(rank_of, lost, monkeypatch):
    """A spare of the lost rank, and the event of its load."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    worker, has_loaded = rank_of(0, RankPlace("here", "a", lost.pid, "2")), threading.Event()

    def load(peers):
        has_loaded.set()
        return Rank()

    monkeypatch.setattr(worker, "_load", load)
    return worker, has_loaded


def connected(worker):
    endpoint = worker.bind("ipc", b"")
    return UnixSocket.connect(Path(endpoint.address.removeprefix("ipc://")), 10.0)


def test_a_spare_sees_the_devices_of_the_rank_it_replaces(spare):
    worker, _ = spare
    place = worker.place()
    assert (place.visible_devices, place.pid) == ("2", os.getpid())


def test_a_spare_of_a_rank_without_devices_sees_what_that_rank_sees(rank_of, lost, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert rank_of(0, RankPlace("here", "a", lost.pid, None)).place().visible_devices is None


def test_a_spare_loads_once_it_has_a_step_and_the_other_rank_has_ended(spare, lost):
    worker, has_loaded = spare
    router, is_needed = connected(worker), threading.Event()

    def wait_and_run():
        worker.stand_by()
        is_needed.set()
        worker.run(PEERS)

    thread = threading.Thread(target=wait_and_run)
    thread.start()
    assert not is_needed.wait(0.2), "it is connected, but has no step"
    router.send(step(1))
    assert is_needed.wait(10)
    assert not has_loaded.wait(0.2), "the memory of the other rank is not free yet"
    lost.kill()
    lost.wait()
    assert has_loaded.wait(10)
    assert serialization.decode_output(router.receive()).step_id == 1
    router.send(serialization.STOP)
    thread.join(10)
    assert not thread.is_alive()


def test_a_spare_fails_where_the_other_rank_does_not_end(spare, monkeypatch):
    worker, has_loaded = spare
    monkeypatch.setattr("cluster.workers.rank.actor._END_TIMEOUT_S", 0.1)
    router = connected(worker)
    router.send(step(1))
    worker.stand_by()
    with pytest.raises(TimeoutError, match=r"did not end within 0\.1 s"):
        worker.run(PEERS)
    assert not has_loaded.is_set()


def test_a_spare_of_a_rank_that_has_ended_before_it_began_loads_at_once(rank_of, lost, monkeypatch):
    lost.kill()
    lost.wait()
    worker = rank_of(0, RankPlace("here", "a", lost.pid, None))
    monkeypatch.setattr(worker, "_load", lambda peers: Rank())
    router = connected(worker)
    router.send(step(1))
    router.send(serialization.STOP)
    worker.stand_by()
    worker.run(PEERS)
    assert serialization.decode_output(router.receive()).step_id == 1
