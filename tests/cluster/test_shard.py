"""What a rank does with the steps on its socket, without Ray and without a model."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster import wire
from cluster.logs import LogConfig
from cluster.model_source import ModelSource
from cluster.shard import ShardSpec, TargetShard
from cluster.unix_socket import PeerGoneError
from specdec.config import EngineConfig
from specdec.step import StepInput, VerifyOutput


class Socket:
    """Gives what was put into it, and keeps what is sent."""

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
    """Answers steps by their number alone, and cannot run some."""

    def __init__(self, failing=()):
        self.failing = failing
        self.ran = []

    def run(self, frames):
        step_id = wire.decode_step(frames).step_id
        self.ran.append(step_id)
        if step_id in self.failing:
            raise MemoryError("no room")
        yield wire.encode_output(VerifyOutput(step_id, ()))


def step(step_id):
    return wire.encode_step(StepInput(step_id, (), (), (), ()))


@pytest.fixture
def ran(tmp_path, monkeypatch):
    def run(messages, rank=0, failing=()):
        """What the rank ran and what it sent, until it was told to stop or left alone."""
        limits = EngineConfig(max_model_len=16, num_blocks=1)
        spec = ShardSpec(
            rank, 2, ModelSource(str(tmp_path), Path(tmp_path)), "float32", "cpu", None, "auto",
            limits, tmp_path, 1, LogConfig(),
        )  # fmt: skip
        monkeypatch.setattr("cluster.shard.logs.configure", lambda config: None)
        shard, socket, model = TargetShard(spec), Socket(messages), Rank(failing)
        shard._listener = SimpleNamespace(accept=lambda: socket, close=lambda: None)
        monkeypatch.setattr(shard, "_load", lambda: model)
        shard.run()
        return model.ran, socket

    return run


def test_steps_are_run_in_order_until_the_stop(ran):
    steps, socket = ran([step(1), step(2), wire.STOP, step(3)])
    assert steps == [1, 2]
    assert [wire.decode_output(frames).step_id for frames in socket.sent] == [1, 2]


def test_only_the_first_rank_answers(ran):
    steps, socket = ran([step(1), wire.STOP], rank=1)
    assert (steps, socket.sent) == ([1], [])


@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_is_run_behind_a_step_that_failed(ran, rank):
    """Its peers may be in another step, and collective calls would bring both together."""
    steps, socket = ran([step(1), step(2), step(3)], rank, failing={1})
    assert steps == [1]
    assert [wire.error_in(frames) for frames in socket.sent] == ["MemoryError: no room"]
    assert socket.messages == [], "it stopped listening"
