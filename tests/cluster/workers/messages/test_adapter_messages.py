# Modules: cluster.workers.rank.adapter_orders
"""Adapters in a rank, and in the group of a target, without Ray."""

import shutil
import time

import pytest

from cluster.workers.groups.target_group import TargetGroup
from cluster.workers.messages import head_messages, serialization
from cluster.workers.messages.adapter_messages import (
    is_adapter_report,
    is_for_adapters,
    load_message,
    load_report,
    order_in,
    unload_message,
)
from cluster.workers.messages.head_messages import LoadInbox
from cluster.workers.messages.profile_messages import END, is_report
from cluster.workers.rank.target_steps import TargetSteps
from cluster.workers.rank.worker import ModelWorker
from cluster.workers.transport.unix_socket import PeerGoneError
from specdec.config.engine import AdapterLimits, EngineConfig
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.types.adapters import AdapterFile
from specdec.types.messages import BlockTableDelta, SequenceAdmission, StepInput, StepRow
from specdec.types.ranks import AdapterTarget
from specdec.types.sampling.sampling_spec import SamplingRules
from specdec.worker import RankModel, load_target
from tests.clock import Clock
from tests.cluster.workers.groups.test_worker_group import ThreadRanks, answer_to_target, spec_of
from tests.specdec.adapters import adapter_dir
from tests.specdec.engines import engine_config


def has_message():
    """Return that no other message waits, which only draft ranks ask."""
    return False


STEP = serialization.encode_step(StepInput(7, (), (), (), ()))
ADAPTER = AdapterFile(3, "sql", "org/sql", "/adapters/sql")


def test_orders_differ_from_steps_heads_and_profiles():
    for message in (load_message(ADAPTER), unload_message(3)):
        assert is_for_adapters(message)
        assert not head_messages.is_for_heads(message)
        assert not is_report(message)
    for message in (STEP, END, serialization.STOP, head_messages.switch_message(2)):
        assert not is_for_adapters(message)
    assert not head_messages.is_load_report(load_report(0, 3, ""))
    assert order_in(load_message(ADAPTER)) == ADAPTER
    assert order_in(unload_message(5)) == 5


@pytest.fixture
def rank(tiny_model_dir):
    config = engine_config(adapters=AdapterLimits(2, 16, 2))
    runner = load_target(RankModel(tiny_model_dir, "float32", config), TensorParallelGroup())
    return ModelWorker(runner, TargetSteps(runner, 1), 1)


def fault_of(report, adapter_id):
    assert is_adapter_report(report)
    inbox = LoadInbox(adapter_id, 1)
    inbox.take(report)
    return inbox.fault


def step(step_id, adapter_id):
    """Return a step of a new sequence with an adapter."""
    admission = SequenceAdmission(step_id, 3, SamplingRules())
    row = StepRow(step_id, 0, (5, 6, 7), 0, True, adapter_id=adapter_id)
    table = BlockTableDelta(step_id, 0, (step_id,))
    return serialization.encode_step(StepInput(step_id, (), (admission,), (table,), (row,)))


def tokens_of(answer):
    return serialization.decode_output(answer).rows[0].token_ids


def test_a_rank_loads_runs_and_frees_an_adapter(rank, tiny_model_dir, tmp_path):
    path = adapter_dir(tmp_path / "sql", tiny_model_dir)
    [report] = rank.run(load_message(AdapterFile(3, "sql", str(path), str(path))), has_message)
    assert fault_of(report, 3) == ""
    shutil.rmtree(path)
    [plain], [adapted] = rank.run(step(1, 0), has_message), rank.run(step(2, 3), has_message)
    assert tokens_of(plain) != tokens_of(adapted)
    assert list(rank.run(unload_message(3), has_message)) == []
    assert list(rank.run(unload_message(99), has_message)) == []
    with pytest.raises(KeyError):
        list(rank.run(step(4, 3), has_message))


def test_a_rank_that_cannot_load_an_adapter_continues(rank, tmp_path):
    absent = str(tmp_path / "absent")
    [report] = rank.run(load_message(AdapterFile(3, "sql", absent, absent)), has_message)
    assert "not found: it must be an existing directory" in fault_of(report, 3)
    [answer] = rank.run(STEP, has_message)
    assert serialization.decode_output(answer).step_id == 7


class ThreadRanksWithAdapters(ThreadRanks):
    """A rank that answers steps and, while `is_running`, loads; `received` has both kinds."""

    fault = ""

    def __init__(self, directory):
        self.received = []
        super().__init__(answer_to_target, directory)

    def _run(self):
        try:
            while (frames := self.peer.receive()) != serialization.STOP:
                self.received.append(frames[0] if is_for_adapters(frames) else b"step")
                if not is_for_adapters(frames):
                    self.peer.send(answer_to_target(frames))
                elif isinstance(order := order_in(frames), AdapterFile):
                    self.is_running.wait(30)
                    self.peer.send(load_report(0, order.adapter_id, self.fault))
        except (PeerGoneError, OSError):
            return


@pytest.fixture
def group(tmp_path):
    spec = spec_of(tmp_path, EngineConfig(max_model_len=16, num_blocks=1))
    group = TargetGroup(spec, None, ThreadRanksWithAdapters(tmp_path))
    group.ranks.received.clear()  # of the step that shows that it is warm
    yield group
    group.close()


def loaded(group):
    ends_at = time.monotonic() + 30
    while (fault := group.collect_adapter_load()) is None:
        assert time.monotonic() < ends_at
        time.sleep(0.01)
    return fault


def test_a_group_orders_loads_between_steps(group):
    assert isinstance(group, AdapterTarget)
    group.ranks.is_running.clear()
    group.begin(StepInput(1, (), (), (), ()))
    group.begin_adapter_load(ADAPTER)
    group.begin(StepInput(2, (), (), (), ()))
    assert group.collect_adapter_load() is None
    assert group._extra_s == head_messages.LOADING_S
    group.ranks.is_running.set()
    assert [group.collect().step_id for _ in range(2)] == [1, 2]
    assert loaded(group) == ""
    assert group._extra_s == 0
    group.unload_adapter(3)
    group.begin(StepInput(3, (), (), (), ()))
    assert group.collect().step_id == 3
    kinds = [b"step", b"load adapter", b"step", b"unload adapter", b"step"]
    assert group.ranks.received == kinds


def test_a_group_reports_the_fault_of_a_rank(group):
    group.ranks.fault = "no such file"
    group.begin_adapter_load(ADAPTER)
    assert loaded(group) == "rank 0: no such file"


def test_the_end_of_a_load_begins_a_new_limit(group):
    group._clock = clock = Clock(time.monotonic())
    group.begin_adapter_load(ADAPTER)
    clock.now_s += 100
    assert loaded(group) == ""
    assert not group._has_answer(), "it is lost"
