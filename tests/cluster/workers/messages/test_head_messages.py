# Modules: cluster.workers.groups.target_group
"""Versions of a draft head in a rank, and in the group of a target, without Ray."""

import shutil
import time

import pytest

from cluster.workers.groups import worker_group
from cluster.workers.groups.step_deadline import MIN_SAMPLES, StepDeadline
from cluster.workers.groups.target_group import TargetGroup
from cluster.workers.messages import serialization
from cluster.workers.messages.head_messages import (
    LoadInbox,
    LoadReport,
    is_for_heads,
    is_load_report,
    load_message,
    order_in,
    switch_message,
)
from cluster.workers.messages.profile_messages import END, is_report
from cluster.workers.rank.target_steps import TargetSteps
from cluster.workers.rank.worker import ModelWorker
from cluster.workers.transport.unix_socket import PeerGoneError
from specdec.config.engine import EngineConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.types.drafters import HeadFile
from specdec.types.messages import StepInput
from specdec.types.ranks import HeadTarget
from specdec.worker import HeadFiles, RankModel, load_target
from tests.clock import Clock
from tests.cluster.workers.groups.test_worker_group import (
    ThreadRanks,
    answer_to_target,
    run_step,
    spec_of,
)
from tests.specdec.engines import engine_config
from tests.specdec.heads import HEADS


def has_message():
    """Return that no other message waits, which only draft ranks ask."""
    return False


STEP = serialization.encode_step(StepInput(7, (), (), (), ()))
HEAD = HeadFile(2, "org/head", "/heads/2")


def test_orders_differ_from_steps_and_profiles():
    for message in (load_message(HEAD), switch_message(2)):
        assert is_for_heads(message)
        assert not is_report(message)
    for message in (STEP, END, serialization.STOP):
        assert not is_for_heads(message)
    assert order_in(load_message(HEAD)) == HEAD
    assert order_in(switch_message(5)) == 5


def test_an_inbox_waits_for_all_ranks_and_names_the_first_fault():
    inbox = LoadInbox(2, 3)
    inbox.take(LoadReport(0, 2, "").encode())
    inbox.take(LoadReport(2, 2, "no such file").encode())
    inbox.take(LoadReport(1, 1, "of another version").encode())
    assert (inbox.is_complete, inbox.fault) == (False, None)
    inbox.take(LoadReport(1, 2, "").encode())
    assert (inbox.is_complete, inbox.fault) == (True, "rank 2: no such file")


@pytest.fixture
def head_dir(tiny_model_dir, tmp_path):
    return HEADS["medusa"](tiny_model_dir, tmp_path / "head", [list(range(3, 60))])


@pytest.fixture
def rank(tiny_model_dir, head_dir):
    speculation = SpeculativeConfig.of("medusa", 3, model=str(head_dir))
    config = engine_config(speculation=speculation)
    head = HeadFiles(head_dir)
    runner = load_target(
        RankModel(tiny_model_dir, "float32", config, head=head), TensorParallelGroup()
    )
    return ModelWorker(runner, TargetSteps(runner, 1), 1)


def test_a_rank_reports_a_load_and_switches_when_ordered(rank, head_dir, tmp_path):
    other = shutil.copytree(head_dir, tmp_path / "other")
    first = rank.runner.head.head
    [report] = rank.run(load_message(HeadFile(2, str(other), str(other))), has_message)
    assert is_load_report(report)
    inbox = LoadInbox(2, 1)
    inbox.take(report)
    assert inbox.fault == ""
    assert rank.runner.head.head is first, "it is loaded and not yet used"
    assert list(rank.run(switch_message(2), has_message)) == []
    assert rank.runner.head.head is not first
    [answer] = rank.run(STEP, has_message)
    assert serialization.decode_output(answer).step_id == 7
    shutil.rmtree(other)
    shutil.rmtree(head_dir)
    [report] = rank.run(load_message(HeadFile(1, str(head_dir), str(head_dir))), has_message)
    inbox = LoadInbox(1, 1)
    inbox.take(report)
    assert inbox.fault == "", "the version before is still in memory"
    list(rank.run(switch_message(1), has_message))
    assert rank.runner.head.head is first


def test_a_rank_that_cannot_load_a_head_continues(rank, tmp_path):
    first = rank.runner.head.head
    [report] = rank.run(load_message(HeadFile(2, "absent", str(tmp_path / "absent"))), has_message)
    inbox = LoadInbox(2, 1)
    inbox.take(report)
    assert "model 'absent' not found" in inbox.fault
    assert rank.runner.head.head is first
    [answer] = rank.run(STEP, has_message)
    assert serialization.decode_output(answer).step_id == 7
    with pytest.raises(AssertionError, match="version 2 of the head is not loaded"):
        list(rank.run(switch_message(2), has_message))


class ThreadRanksWithHead(ThreadRanks):
    """A rank that answers steps and, while `is_running`, loads; `received` has both kinds."""

    fault = ""

    def __init__(self, directory):
        self.received = []
        super().__init__(answer_to_target, directory)

    def _run(self):
        try:
            while (frames := self.peer.receive()) != serialization.STOP:
                self.received.append(frames[0] if is_for_heads(frames) else b"step")
                if not is_for_heads(frames):
                    self.peer.send(answer_to_target(frames))
                elif isinstance(order := order_in(frames), HeadFile):
                    self.is_running.wait(30)
                    time.sleep(self.delay_s)
                    self.peer.send(LoadReport(0, order.version, self.fault).encode())
        except (PeerGoneError, OSError):
            return


@pytest.fixture
def group(tmp_path):
    spec = spec_of(tmp_path, EngineConfig(max_model_len=16, num_blocks=1))
    group = TargetGroup(spec, None, ThreadRanksWithHead(tmp_path))
    group.ranks.received.clear()  # of the step that shows that it is warm
    yield group
    group.close()


def loaded(group):
    ends_at = time.monotonic() + 30
    while (fault := group.collect_head_load()) is None:
        assert time.monotonic() < ends_at
        time.sleep(0.01)
    return fault


def test_a_group_orders_loads_and_switches_between_steps(group):
    assert isinstance(group, HeadTarget)
    group.ranks.is_running.clear()
    group.begin(StepInput(1, (), (), (), ()))
    group.begin_head_load(HEAD)
    group.begin(StepInput(2, (), (), (), ()))
    assert group.collect_head_load() is None
    group.ranks.is_running.set()
    assert [group.collect().step_id for _ in range(2)] == [1, 2]
    assert loaded(group) == ""
    group.switch_head(2)
    group.begin(StepInput(3, (), (), (), ()))
    assert group.collect().step_id == 3
    assert group.ranks.received == [b"step", b"load head", b"step", b"switch head", b"step"]


def test_a_group_reports_the_fault_of_a_rank(group):
    group.ranks.fault = "no such file"
    group.begin_head_load(HEAD)
    assert loaded(group) == "rank 0: no such file"


def test_a_step_may_take_longer_while_a_head_is_loaded(group, monkeypatch):
    monkeypatch.setattr(worker_group, "_LIVENESS_CHECK_PERIOD_MS", 50)
    group._deadlines = StepDeadline(0.2, 60.0, 20.0)
    for step_id in range(MIN_SAMPLES):
        run_step(group, step_id)
    group.ranks.delay_s = 0.5
    group.begin_head_load(HEAD)
    assert run_step(group, MIN_SAMPLES).step_id == MIN_SAMPLES


def test_the_end_of_a_load_begins_a_new_limit(group):
    group._clock = clock = Clock(time.monotonic())
    group.begin_head_load(HEAD)
    clock.now_s += 100
    assert loaded(group) == ""
    assert not group._has_answer(), "it is lost"
