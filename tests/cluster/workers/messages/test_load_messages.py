# Modules: cluster.workers.groups.target_group, cluster.workers.rank.adapter_orders
"""Versions of a draft head and adapters in a rank, and in the group of a target, without Ray."""

import shutil
import time
from dataclasses import replace

import pytest

from cluster.workers.groups import worker_group
from cluster.workers.groups.step_deadline import MIN_SAMPLES, StepDeadline
from cluster.workers.groups.target_group import TargetGroup
from cluster.workers.messages import serialization
from cluster.workers.messages.load_messages import ADAPTERS, HEADS, LOADING_S, LoadInbox
from cluster.workers.messages.profile_messages import END, is_report
from cluster.workers.rank.target_steps import TargetSteps
from cluster.workers.rank.worker import ModelWorker
from cluster.workers.transport.unix_socket import PeerGoneError
from specdec.config.engine import AdapterLimits, EngineConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.types.adapters import AdapterFile
from specdec.types.drafters import HeadFile
from specdec.types.messages import BlockTableDelta, SequenceAdmission, StepInput, StepRow
from specdec.types.ranks import AdapterTarget, HeadTarget
from specdec.types.sampling.sampling_spec import SamplingRules
from specdec.worker import HeadFiles, RankModel, load_target
from tests.clock import Clock
from tests.cluster.workers.groups.test_worker_group import (
    ThreadRanks,
    answer_to_target,
    run_step,
    spec_of,
)
from tests.specdec.adapters import adapter_dir
from tests.specdec.engines import engine_config
from tests.specdec.heads import HEADS as HEAD_MAKERS


def has_message():
    """Return that no other message waits, which only draft ranks ask."""
    return False


STEP = serialization.encode_step(StepInput(7, (), (), (), ()))
HEAD = HeadFile(3, "org/head", "/heads/3")
ADAPTER = AdapterFile(3, "sql", "org/sql", "/adapters/sql")
KINDS = pytest.mark.parametrize(
    ("messages", "file"), [(HEADS, HEAD), (ADAPTERS, ADAPTER)], ids=["head", "adapter"]
)


@KINDS
def test_orders_differ_from_steps_profiles_and_the_other_kind(messages, file):
    [other] = {HEADS, ADAPTERS} - {messages}
    for message in (messages.load(file), messages.change(3)):
        assert messages.is_order(message)
        assert not other.is_order(message)
        assert not is_report(message)
    for message in (STEP, END, serialization.STOP):
        assert not messages.is_order(message)
    assert messages.is_report(messages.report(0, 3, ""))
    assert not other.is_report(messages.report(0, 3, ""))
    assert messages.order_in(messages.load(file)) == file
    assert messages.order_in(messages.change(5)) == 5


@KINDS
def test_an_inbox_waits_for_all_ranks_and_names_the_first_fault(messages, file):
    inbox = messages.inbox(file, 3)
    inbox.take(messages.report(0, 3, ""))
    inbox.take(messages.report(2, 3, "no such file"))
    inbox.take(messages.report(1, 1, "of another load"))
    assert (inbox.extra_s, inbox.fault) == (LOADING_S, None)
    inbox.take(messages.report(1, 3, ""))
    assert (inbox.extra_s, inbox.fault) == (0, "rank 2: no such file")


def fault_of(report, messages, number):
    assert messages.is_report(report)
    inbox = LoadInbox(number, 1)
    inbox.take(report)
    return inbox.fault


@pytest.fixture
def head_dir(tiny_model_dir, tmp_path):
    return HEAD_MAKERS["medusa"](tiny_model_dir, tmp_path / "head", [list(range(3, 60))])


def rank_of(tiny_model_dir, head=None, **config):
    model = RankModel(tiny_model_dir, "float32", engine_config(**config), head=head)
    runner = load_target(model, TensorParallelGroup())
    return ModelWorker(runner, TargetSteps(runner, 1), 1)


@pytest.fixture
def rank_with_head(tiny_model_dir, head_dir):
    speculation = SpeculativeConfig.of("medusa", 3, model=str(head_dir))
    return rank_of(tiny_model_dir, HeadFiles(head_dir), speculation=speculation)


@pytest.fixture
def rank_with_adapters(tiny_model_dir):
    return rank_of(tiny_model_dir, adapters=AdapterLimits(2, 16, 2))


def test_a_rank_reports_a_load_and_switches_when_ordered(rank_with_head, head_dir, tmp_path):
    rank = rank_with_head
    other = shutil.copytree(head_dir, tmp_path / "other")
    first = rank.runner.head.head
    [report] = rank.run(HEADS.load(HeadFile(2, str(other), str(other))), has_message)
    assert fault_of(report, HEADS, 2) == ""
    assert rank.runner.head.head is first, "it is loaded and not yet used"
    assert list(rank.run(HEADS.change(2), has_message)) == []
    assert rank.runner.head.head is not first
    [answer] = rank.run(STEP, has_message)
    assert serialization.decode_output(answer).step_id == 7
    shutil.rmtree(other)
    shutil.rmtree(head_dir)
    [report] = rank.run(HEADS.load(HeadFile(1, str(head_dir), str(head_dir))), has_message)
    assert fault_of(report, HEADS, 1) == "", "the version before is still in memory"
    list(rank.run(HEADS.change(1), has_message))
    assert rank.runner.head.head is first


def test_a_rank_that_cannot_load_a_head_continues(rank_with_head, tmp_path):
    rank = rank_with_head
    first = rank.runner.head.head
    [report] = rank.run(HEADS.load(HeadFile(2, "absent", str(tmp_path / "absent"))), has_message)
    assert "model 'absent' not found" in fault_of(report, HEADS, 2)
    assert rank.runner.head.head is first
    [answer] = rank.run(STEP, has_message)
    assert serialization.decode_output(answer).step_id == 7
    with pytest.raises(AssertionError, match="version 2 of the head is not loaded"):
        list(rank.run(HEADS.change(2), has_message))


def step(step_id, adapter_id):
    """Return a step of a new sequence with an adapter."""
    admission = SequenceAdmission(step_id, 3, SamplingRules())
    row = StepRow(step_id, 0, (5, 6, 7), 0, True, adapter_id=adapter_id)
    table = BlockTableDelta(step_id, 0, (step_id,))
    return serialization.encode_step(StepInput(step_id, (), (admission,), (table,), (row,)))


def tokens_of(answer):
    return serialization.decode_output(answer).rows[0].token_ids


def test_a_rank_loads_runs_and_frees_an_adapter(rank_with_adapters, tiny_model_dir, tmp_path):
    run = rank_with_adapters.run
    path = adapter_dir(tmp_path / "sql", tiny_model_dir)
    [report] = run(ADAPTERS.load(AdapterFile(3, "sql", str(path), str(path))))
    assert fault_of(report, ADAPTERS, 3) == ""
    shutil.rmtree(path)
    [plain], [adapted] = run(step(1, 0)), run(step(2, 3))
    assert tokens_of(plain) != tokens_of(adapted)
    assert list(run(ADAPTERS.change(3))) == []
    assert list(run(ADAPTERS.change(99))) == []
    with pytest.raises(KeyError):
        list(run(step(4, 3)))


def test_a_rank_that_cannot_load_an_adapter_continues(rank_with_adapters, tmp_path):
    absent = str(tmp_path / "absent")
    order = ADAPTERS.load(AdapterFile(3, "sql", absent, absent))
    [report] = rank_with_adapters.run(order, has_message)
    assert "not found: it must be an existing directory" in fault_of(report, ADAPTERS, 3)
    [answer] = rank_with_adapters.run(STEP, has_message)
    assert serialization.decode_output(answer).step_id == 7


class ThreadRanksThatLoad(ThreadRanks):
    """A rank that answers steps and, while `is_running`, loads; `received` has both kinds."""

    fault = ""

    def __init__(self, directory):
        self.received = []
        super().__init__(answer_to_target, directory)

    def _run(self):
        try:
            while (frames := self.peer.receive()) != serialization.STOP:
                messages = next((each for each in (HEADS, ADAPTERS) if each.is_order(frames)), None)
                self.received.append(b"step" if messages is None else frames[0])
                if messages is None:
                    self.peer.send(answer_to_target(frames))
                    continue
                for report in messages.execute(frames, 0, self._load, lambda number: None):
                    self.peer.send(report)
        except (PeerGoneError, OSError):
            return

    def _load(self, file):
        self.is_running.wait(30)
        time.sleep(self.delay_s)
        return self.fault


@pytest.fixture
def group(tmp_path):
    spec = spec_of(tmp_path, EngineConfig(max_model_len=16, num_blocks=1))
    group = TargetGroup(spec, None, ThreadRanksThatLoad(tmp_path))
    group.ranks.received.clear()  # of the step that shows that it is warm
    yield group
    group.close()


def calls(group, messages):
    """Return what begins a load in a group, looks for its end, and changes to a number."""
    if messages is HEADS:
        return group.begin_head_load, group.collect_head_load, group.switch_head
    return group.begin_adapter_load, group.collect_adapter_load, group.unload_adapter


def loaded(collect):
    ends_at = time.monotonic() + 30
    while (fault := collect()) is None:
        assert time.monotonic() < ends_at
        time.sleep(0.01)
    return fault


@KINDS
def test_a_group_orders_loads_and_changes_between_steps(group, messages, file):
    assert isinstance(group, AdapterTarget)
    assert isinstance(group, HeadTarget)
    begin, collect, change = calls(group, messages)
    group.ranks.is_running.clear()
    group.begin(StepInput(1, (), (), (), ()))
    begin(file)
    group.begin(StepInput(2, (), (), (), ()))
    assert collect() is None
    assert group._extra_s == LOADING_S
    group.ranks.is_running.set()
    assert [group.collect().step_id for _ in range(2)] == [1, 2]
    assert loaded(collect) == ""
    assert group._extra_s == 0
    change(3)
    group.begin(StepInput(3, (), (), (), ()))
    assert group.collect().step_id == 3
    load, changed = (frames[0] for frames in (messages.load(file), messages.change(3)))
    assert group.ranks.received == [b"step", load, b"step", changed, b"step"]


@KINDS
def test_a_group_reports_the_fault_of_a_rank(group, messages, file):
    begin, collect, _ = calls(group, messages)
    group.ranks.fault = "no such file"
    begin(file)
    assert loaded(collect) == "rank 0: no such file"


def test_a_step_may_take_longer_while_a_head_is_loaded(group, monkeypatch):
    monkeypatch.setattr(worker_group, "_LIVENESS_CHECK_PERIOD_MS", 50)
    group._deadlines = StepDeadline(0.2, 60.0, 20.0)
    for step_id in range(MIN_SAMPLES):
        run_step(group, step_id)
    group.ranks.delay_s = 0.5
    group.begin_head_load(HEAD)
    assert run_step(group, MIN_SAMPLES).step_id == MIN_SAMPLES


@pytest.mark.parametrize(
    ("device", "enforce_eager", "switching_s"),
    [("cuda", False, LOADING_S), ("cuda", True, 0), ("cpu", False, 0)],
)
def test_the_first_step_after_a_switch_may_take_longer(group, device, enforce_eager, switching_s):
    """Ranks on a GPU capture graphs before it, after the answers to the steps that were sent."""
    limits = replace(group._spec.limits, enforce_eager=enforce_eager)
    group._spec = replace(group._spec, device=device, limits=limits)
    group.begin(StepInput(1, (), (), (), ()))
    group.switch_head(2)
    group.begin(StepInput(2, (), (), (), ()))
    group.begin(StepInput(3, (), (), (), ()))
    extra_s = []
    for step_id in (1, 2, 3):
        extra_s.append(group._extra_s)
        assert group.collect().step_id == step_id
    assert extra_s == [switching_s, switching_s, 0]


def test_a_step_that_waits_for_a_load_or_a_switch_sets_no_limit(group, monkeypatch):
    sizes = []
    monkeypatch.setattr(group._deadlines, "record", lambda size, seconds: sizes.append(size))
    group._spec = replace(group._spec, device="cuda")
    run_step(group, 1, num_tokens=1)
    group.begin_head_load(HEAD)
    run_step(group, 2, num_tokens=2)
    assert loaded(group.collect_head_load) == ""
    run_step(group, 3, num_tokens=3)
    group.switch_head(2)
    run_step(group, 4, num_tokens=4)
    run_step(group, 5, num_tokens=5)
    assert sizes == [1, 3, 5]


@KINDS
def test_the_end_of_a_load_begins_a_new_limit(group, messages, file):
    begin, collect, _ = calls(group, messages)
    group._clock = clock = Clock(time.monotonic())
    begin(file)
    clock.now_s += 100
    assert loaded(collect) == ""
    assert not group._has_answer(), "it is lost"
