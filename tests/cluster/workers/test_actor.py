"""The step loop of a rank, without Ray and without a model."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.observability.logs import LogConfig
from cluster.workers import serialization
from cluster.workers.actor import TargetWorker
from cluster.workers.group_spec import GroupSpec, ModelSource
from cluster.workers.unix_socket import PeerGoneError
from specdec.config.engine import EngineConfig
from specdec.types.messages import StepInput, VerifyOutput


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

    def run(self, frames):
        step_id = serialization.decode_step(frames).step_id
        self.ran.append(step_id)
        if step_id in self.failing:
            raise MemoryError("no room")
        yield serialization.encode_output(VerifyOutput(step_id, ()))


def step(step_id):
    return serialization.encode_step(StepInput(step_id, (), (), (), ()))


@pytest.fixture
def ran(tmp_path, monkeypatch):
    def run(messages, rank=0, failing=()):
        """Return the executed steps and the socket, at the stop or the loss of the peer."""
        limits = EngineConfig(max_model_len=16, num_blocks=1)
        spec = GroupSpec(
            "target", ModelSource(str(tmp_path), Path(tmp_path)), "float32", "cpu", None, "auto",
            2, limits, 1, 1, None, 60.0, 60.0, LogConfig(),
        )  # fmt: skip
        monkeypatch.setattr("cluster.workers.actor.logs.configure", lambda config: None)
        worker = TargetWorker(spec, rank, tmp_path)
        socket, model = Socket(messages), Rank(failing)
        worker._listener = SimpleNamespace(accept=lambda: socket, close=lambda: None)
        monkeypatch.setattr(worker, "_load", lambda: model)
        worker.run()
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
