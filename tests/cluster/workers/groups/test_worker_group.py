# Modules: cluster.workers.group_spec, cluster.workers.groups.roles
"""A group's deadlines, with ranks that are threads on real sockets, without Ray."""

import tempfile
import threading
import time
from collections import Counter
from itertools import count
from pathlib import Path

import pytest

from cluster.observability.logs import LogConfig
from cluster.workers.group_spec import GroupSpec, ModelSource
from cluster.workers.groups import worker_group
from cluster.workers.groups.ranks import RankLoss
from cluster.workers.groups.roles import DRAFT, TARGET
from cluster.workers.groups.step_deadline import MIN_SAMPLES
from cluster.workers.groups.supervisors import DraftSupervisor
from cluster.workers.groups.worker_group import WorkerGroup
from cluster.workers.messages import draft_serialization, serialization
from cluster.workers.messages.profile_messages import WorkerProfileOrder
from cluster.workers.transport.unix_socket import PeerGoneError, UnixListener, UnixSocket
from specdec.config.engine import DraftLimits, EngineConfig
from specdec.sequences.sequence import Sequence
from specdec.speculation.proposers import DraftRequest, DraftVocabulary, SentRow
from specdec.types.draft_messages import (
    AheadDraft,
    AheadOutput,
    Continuation,
    DraftedRow,
    DraftOutput,
)
from specdec.types.drafts.draft_decision import DraftAhead
from specdec.types.errors import TargetFailedError
from specdec.types.messages import StepInput, StepRow, VerifyOutput
from specdec.types.reports.profile import WorkerProfile
from specdec.types.sampling.sampling_spec import SamplingRules
from tests.clock import Clock
from tests.specdec.engines import request

LIMITS = DraftLimits(num_blocks=20, block_size=4, max_model_len=80, max_catch_up_tokens=16)


def answer_to_target(frames):
    return serialization.encode_output(VerifyOutput(serialization.decode_step(frames).step_id, ()))


def answer_to_draft(frames):
    step = draft_serialization.decode_draft_step(frames)
    if step.ahead:
        return draft_serialization.encode_ahead_output(
            AheadOutput(step.step_id, tuple(map(ahead_draft, step.ahead)))
        )
    rows = tuple(DraftedRow(row.seq_id, (7,) * row.num_draft_tokens) for row in step.drafts)
    return draft_serialization.encode_draft_output(DraftOutput(step.step_id, rows))


def ahead_draft(row):
    """Return a draft after all drafts and token 9."""
    drafted = (8,) * row.num_draft_tokens
    return AheadDraft(row.seq_id, (Continuation(row.num_drafts, 9, drafted),))


class ThreadRanks:
    """One rank, a thread that answers while `is_running`, `delay_s` late."""

    are_shared = False

    def __init__(self, answer, directory):
        listener = UnixListener(directory / "rank")
        self._socket = UnixSocket.connect(directory / "rank", 60.0)
        self.peer = listener.accept()
        self._answer = answer
        self.is_running = threading.Event()
        self.is_running.set()
        self.delay_s = 0.0
        self.ended = None  # what Ray reports
        threading.Thread(target=self._run, daemon=True).start()

    def connect(self, context):
        yield self._socket

    def loss(self):
        return self.ended

    def wait_until_ended(self, timeout_s):
        """The thread ends when its socket is closed."""

    def kill(self):
        """The same."""

    def end(self):
        self.peer.close()

    def _run(self):
        try:
            while (frames := self.peer.receive()) != serialization.STOP:
                self.is_running.wait(30)
                time.sleep(self.delay_s)
                self.peer.send(self._answer(frames))
        except (PeerGoneError, OSError):
            return


def spec_of(directory, limits):
    return GroupSpec(
        "model", ModelSource("m", directory), "float32", "cpu", None, "auto", 1, limits, 1, (1,),
        None, 90.0, 60.0, LogConfig(),
    )  # fmt: skip


def group_of(role, directory, limits, clock=time.monotonic):
    answer = answer_to_draft if role is DRAFT else answer_to_target
    sockets = Path(tempfile.mkdtemp(dir=directory))
    ranks = ThreadRanks(answer, sockets)
    return WorkerGroup(role, spec_of(directory, limits), None, ranks, clock)


@pytest.fixture
def target(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_group, "_MIN_STEP_TIMEOUT_S", 0.2)
    monkeypatch.setattr(worker_group, "_LIVENESS_CHECK_PERIOD_MS", 50)
    group = group_of(TARGET, tmp_path, EngineConfig(max_model_len=16, num_blocks=1))
    yield group
    group.ranks.is_running.set()
    group.close()


def run_step(group, step_id, num_tokens=1):
    rows = (StepRow(0, 0, (1,) * num_tokens, 0, True),)
    group.begin(StepInput(step_id, (), (), (), rows))
    return group.collect()


def test_a_rank_that_stops_is_noticed_by_the_times_of_earlier_steps(target):
    for step_id in range(MIN_SAMPLES):
        run_step(target, step_id)
    target.ranks.is_running.clear()
    began_s = time.monotonic()
    with pytest.raises(TargetFailedError, match="did not answer in time"):
        run_step(target, MIN_SAMPLES)
    assert 0.2 <= time.monotonic() - began_s < 50, "the full limit is 60 s"


def test_the_end_of_a_rank_is_noticed_by_its_socket_with_the_reason_from_ray(target, monkeypatch):
    monkeypatch.setattr(worker_group, "_LIVENESS_CHECK_PERIOD_MS", 60_000)

    def end():
        target.ranks.end()
        time.sleep(0.1)  # Ray reports it later
        target.ranks.ended = RankLoss(0, "ended: MemoryError")

    target.ranks.is_running.clear()
    target.begin(StepInput(1, (), (), (), ()))
    threading.Thread(target=end).start()
    began_s = time.monotonic()
    with pytest.raises(TargetFailedError, match="rank 0 of the model ended: MemoryError"):
        target.collect()
    assert time.monotonic() - began_s < 30


def test_a_rank_that_has_closed_its_socket_is_lost_even_if_ray_reports_nothing(target, monkeypatch):
    monkeypatch.setattr(worker_group, "_REASON_TIMEOUT_S", 0.1)
    target.ranks.is_running.clear()
    target.begin(StepInput(1, (), (), (), ()))
    target.ranks.end()
    with pytest.raises(TargetFailedError, match="rank 0 of the model has closed its socket"):
        target.collect()


def test_ranks_have_the_start_limit_until_they_are_warm(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_group, "_LIVENESS_CHECK_PERIOD_MS", 1)
    spec = spec_of(tmp_path, EngineConfig(max_model_len=16, num_blocks=1))
    ranks, seconds = ThreadRanks(answer_to_target, tmp_path), count()
    ranks.is_running.clear()
    with pytest.raises(TargetFailedError, match="did not answer in time"):
        WorkerGroup(TARGET, spec, None, ranks, seconds.__next__)
    assert 90 < next(seconds) < 100
    ranks.is_running.set()


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """A group with a step in flight, whose rank answers nothing, and its clock."""
    monkeypatch.setattr(worker_group, "_LIVENESS_CHECK_PERIOD_MS", 1)
    clock = Clock()
    group = group_of(TARGET, tmp_path, EngineConfig(max_model_len=16, num_blocks=1), clock)
    group.ranks.is_running.clear()
    group.begin(StepInput(1, (), (), (), ()))
    yield group, clock
    group.ranks.end()
    group.ranks.is_running.set()
    group.close()


def is_lost_after(limit_s, group, clock):
    clock.now_s += limit_s - 0.1
    assert not group._has_answer()
    clock.now_s += 0.2
    assert group._has_answer()
    with pytest.raises(TargetFailedError, match="did not answer in time"):
        group.collect()


def test_the_first_step_has_the_full_limit(stopped):
    is_lost_after(60, *stopped)


def test_the_limit_of_a_second_step_in_flight_begins_with_the_first_answer(stopped):
    group, clock = stopped
    group.begin(StepInput(2, (), (), (), ()))
    clock.now_s += 54
    group.ranks.peer.send(serialization.encode_output(VerifyOutput(1, ())))
    assert group.collect().step_id == 1
    is_lost_after(60, group, clock)


@pytest.mark.parametrize(("num_reports", "left_s"), [(0, 20), (1, 20), (2, 60)])
def test_only_the_last_report_begins_a_limit(stopped, monkeypatch, num_reports, left_s):
    """Until then ranks have 60 s more: the first may come from a rank that is not stopped."""
    monkeypatch.setattr(WorkerGroup, "num_ranks", 2)
    group, clock = stopped
    order = WorkerProfileOrder("target", 1, "traces", 1)
    group.begin_profile(order)
    clock.now_s += 100
    for rank in range(num_reports):
        group.ranks.peer.send(order.report(WorkerProfile("target", rank, 1)))
    assert not group._has_answer()
    is_lost_after(left_s, group, clock)


def test_the_first_prefill_after_decode_steps_has_the_full_limit(target):
    for step_id in range(MIN_SAMPLES):
        run_step(target, step_id)
    target.ranks.delay_s = 0.5
    assert run_step(target, MIN_SAMPLES, num_tokens=300).step_id == MIN_SAMPLES


@pytest.fixture
def drafting(tmp_path, monkeypatch):
    """A supervisor of a draft model, and its groups."""
    monkeypatch.setattr(worker_group, "_MIN_STEP_TIMEOUT_S", 60.0)
    monkeypatch.setattr(worker_group, "_LIVENESS_CHECK_PERIOD_MS", 50)
    groups = []

    def start():
        groups.append(group_of(DRAFT, tmp_path, LIMITS))
        return groups[-1]

    supervisor = DraftSupervisor(start, LIMITS, DraftVocabulary())
    yield supervisor, groups
    for group in groups:
        group.ranks.is_running.set()
    supervisor.close()


def drafts(supervisor, seq):
    return [proposal.draft_token_ids for proposal in supervisor.take([DraftRequest(seq, 3)])]


def sequence():
    return Sequence(0, request("r", [1, 2, 3]), SamplingRules(), detokenizer=None)


def test_a_late_draft_is_not_waited_for(drafting):
    supervisor, groups = drafting
    seq, made = sequence(), Counter()
    for _ in range(MIN_SAMPLES):
        assert drafts(supervisor, seq) == [(7, 7, 7)]
    for seconds in groups[0].patience._seconds.values():
        seconds.append(60.0)  # a single slow one is not typical
    groups[0].ranks.is_running.clear()
    for _ in range(20):
        made[len(drafts(supervisor, seq))] += 1
    assert made == {0: 20}
    assert supervisor.num_late_drafts == 1, "only the first step waits"
    assert len(groups) == 1, "not until the worker is restarted"
    supervisor._proposer.check_integrity()


def test_a_draft_worker_that_ends_is_replaced_before_the_reason_is_known(drafting, monkeypatch):
    """The first step after its end gives up before Ray reports it, and does not wait longer."""
    monkeypatch.setattr(worker_group, "_REASON_TIMEOUT_S", 0.2)
    supervisor, groups = drafting
    seq = sequence()
    for _ in range(MIN_SAMPLES):
        drafts(supervisor, seq)
    groups[0].ranks.is_running.clear()
    groups[0].ranks.end()
    ends_at_s = time.monotonic() + 30  # the deadline of a step is later
    while drafts(supervisor, seq) == []:
        assert time.monotonic() < ends_at_s
    assert len(groups) == 2


def test_drafting_goes_on_when_a_late_draft_has_arrived(drafting):
    supervisor, groups = drafting
    seq = sequence()
    for _ in range(MIN_SAMPLES):
        drafts(supervisor, seq)
    groups[0].ranks.is_running.clear()
    assert drafts(supervisor, seq) == []
    groups[0].ranks.is_running.set()
    ends_at_s = time.monotonic() + 30
    while (made := drafts(supervisor, seq)) == []:
        assert time.monotonic() < ends_at_s
    assert made == [(7, 7, 7)]
    assert len(groups) == 1, "the worker was not restarted"


def test_a_late_draft_does_not_lengthen_the_patience(drafting):
    supervisor, groups = drafting
    seq = sequence()
    for _ in range(MIN_SAMPLES):
        drafts(supervisor, seq)
    for _ in range(3):
        groups[0].ranks.is_running.clear()
        assert drafts(supervisor, seq) == []
        groups[0].ranks.is_running.set()
        ends_at_s = time.monotonic() + 30
        while drafts(supervisor, seq) == []:
            assert time.monotonic() < ends_at_s
    num_recorded = sum(map(len, groups[0].patience._seconds.values()))
    assert num_recorded == MIN_SAMPLES + 3, "only the drafts that were in time"


def test_a_draft_worker_that_stays_late_is_restarted(drafting, monkeypatch):
    supervisor, groups = drafting
    monkeypatch.setattr(groups[0]._deadlines, "_min_s", 0.3)
    seq = sequence()
    for _ in range(MIN_SAMPLES):
        drafts(supervisor, seq)
    groups[0].ranks.is_running.clear()
    ends_at_s = time.monotonic() + 30
    while drafts(supervisor, seq) == []:
        assert time.monotonic() < ends_at_s
    assert len(groups) == 2


def send_ahead(supervisor, seq, drafted):
    """Let the draft model draft after a row with the drafts `drafted`."""
    supervisor.ahead([SentRow(seq, seq.num_tokens, drafted, 2, None, DraftAhead.CONTINUING)])


def take_ahead(supervisor, seq, *, may_wait=False):
    [request_] = [DraftRequest(seq, 2, may_wait=may_wait)]
    return [each.draft_token_ids for each in supervisor.take([request_])]


def test_a_draft_ahead_is_taken_when_it_has_arrived(drafting):
    supervisor, _ = drafting
    seq = sequence()
    [drafted] = drafts(supervisor, seq)
    send_ahead(supervisor, seq, drafted)
    seq.token_ids += [*drafted, 9]
    ends_at_s = time.monotonic() + 30
    while (made := take_ahead(supervisor, seq)) == []:
        assert time.monotonic() < ends_at_s
    assert made == [(8, 8)]


def test_a_draft_ahead_that_has_not_arrived_is_not_waited_for(drafting):
    supervisor, groups = drafting
    seq = sequence()
    [drafted] = drafts(supervisor, seq)
    groups[0].ranks.is_running.clear()
    send_ahead(supervisor, seq, drafted)
    seq.token_ids += [*drafted, 9]
    began_at_s = time.monotonic()
    assert take_ahead(supervisor, seq) == []
    assert time.monotonic() - began_at_s < 20, "the rank answers after 30 s"
    groups[0].ranks.is_running.set()
    assert take_ahead(supervisor, seq, may_wait=True) == [(8, 8)]


def test_a_miss_that_may_wait_gets_a_separate_draft(drafting):
    supervisor, _ = drafting
    seq = sequence()
    [drafted] = drafts(supervisor, seq)
    send_ahead(supervisor, seq, drafted)
    seq.token_ids += [*drafted, 5]
    assert take_ahead(supervisor, seq, may_wait=True) == [(7, 7)]
    assert supervisor.counts.ahead.misses == {"3": 1}


def test_a_worker_that_ends_while_it_drafts_ahead_is_replaced(drafting, monkeypatch):
    monkeypatch.setattr(worker_group, "_REASON_TIMEOUT_S", 0.2)
    supervisor, groups = drafting
    seq = sequence()
    [drafted] = drafts(supervisor, seq)
    groups[0].ranks.is_running.clear()
    send_ahead(supervisor, seq, drafted)
    groups[0].ranks.end()
    seq.token_ids += [*drafted, 9]
    ends_at_s = time.monotonic() + 30
    while take_ahead(supervisor, seq, may_wait=True) == []:
        assert time.monotonic() < ends_at_s
    assert len(groups) == 2
    assert supervisor.counts.ahead.hits == {}, "a table of the lost worker was used"
