"""Restarts of lost worker groups, with groups that fail on command."""

import threading

import pytest

from cluster.workers.groups.supervisors import MAX_FAILURES, DraftSupervisor, TargetSupervisor
from cluster.workers.messages.profile_messages import WorkerProfileOrder
from specdec.config.engine import DraftLimits
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.sequences.sequence import Sequence
from specdec.speculation.proposers import DraftRequest, DraftVocabulary, make_proposer
from specdec.types.draft_messages import DraftedRow, DraftOutput
from specdec.types.errors import DraftFailedError, TargetFailedError
from specdec.types.sampling.sampling_spec import SamplingRules
from tests.specdec.engines import request
from tests.waiting import wait_until

LIMITS = DraftLimits(num_blocks=20, block_size=4, max_model_len=80, max_catch_up_tokens=16)


class Worker:
    """Group that drafts token 7 until `error` is set."""

    poll_busy = poll_late = lambda self: False

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.is_killed = self.is_closed = False
        self._step = None

    def begin(self, step):
        if self.error is not None:
            raise self.error
        self._step = step

    def collect(self):
        rows = [DraftedRow(row.seq_id, (7,) * row.num_draft_tokens) for row in self._step.drafts]
        return DraftOutput(self._step.step_id, tuple(rows))

    def check_alive(self):
        if self.error is not None:
            raise self.error

    def kill(self):
        self.is_killed = True

    def close(self):
        self.is_closed = True


class ProfiledWorker(Worker):
    """Group that records the calls about a profile, which never ends."""

    num_ranks = 2

    def __init__(self):
        super().__init__()
        self.calls = []

    def begin_profile(self, order):
        self.calls.append("begin")

    def end_profile(self):
        self.calls.append("end")

    def collect_profile(self):
        self.calls.append("collect")


@pytest.fixture
def workers():
    return []


@pytest.fixture
def start(workers):
    def start():
        workers.append(Worker())
        return workers[-1]

    return start


def drafts(proposer, seq=None):
    seq = seq or Sequence(0, request("r", [1, 2, 3]), SamplingRules(), detokenizer=None)
    return [proposal.draft_token_ids for proposal in proposer.take([DraftRequest(seq, 3)])]


@pytest.mark.parametrize("error", [DraftFailedError("it died"), KeyError("a bug of ours")])
def test_a_lost_draft_worker_is_replaced_without_an_error_for_requests(start, workers, error):
    supervisor = DraftSupervisor(start, LIMITS, DraftVocabulary())
    assert drafts(supervisor) == [(7, 7, 7)]
    workers[0].error = error
    assert drafts(supervisor) == []
    assert workers[0].is_killed
    wait_until(lambda: supervisor.is_available)
    assert supervisor.num_restarts == 1, "a restart counts before the first draft"
    assert drafts(supervisor) == [(7, 7, 7)]
    assert supervisor.num_restarts == 1
    supervisor.close()
    assert workers[1].is_closed


def test_catch_up_tokens_are_counted_across_restarts(start, workers):
    supervisor = DraftSupervisor(start, LIMITS, DraftVocabulary())
    seq = Sequence(0, request("r", [1] * 50), SamplingRules(), detokenizer=None)
    assert drafts(supervisor, seq) == []
    assert supervisor.counts.num_catch_up_tokens == 16
    workers[0].error = DraftFailedError("it died")
    assert drafts(supervisor, seq) == []
    wait_until(lambda: supervisor.is_available)
    assert drafts(supervisor, seq) == []
    assert supervisor.counts.num_catch_up_tokens == 32
    supervisor.close()


def test_what_was_observed_of_drafts_ahead_outlasts_a_worker(start, workers):
    supervisor = DraftSupervisor(start, LIMITS, DraftVocabulary())
    assert drafts(supervisor) == [(7, 7, 7)]
    for _ in range(100):
        supervisor._proposer._ahead.planner.outcomes.observe(3, 3, 0, 1)
    planned = supervisor._proposer._ahead.planner.outcomes.hit_rate((0, 0, 0, 1))
    assert planned > 0.9
    workers[0].error = DraftFailedError("it died")
    assert drafts(supervisor) == []
    wait_until(lambda: supervisor.is_available)
    assert drafts(supervisor) == [(7, 7, 7)]
    outcomes = supervisor._proposer._ahead.planner.outcomes
    assert outcomes.hit_rate((0, 0, 0, 1)) == planned
    supervisor.close()


def test_a_lookup_drafts_while_the_worker_restarts(start, workers):
    supervisor = DraftSupervisor(start, LIMITS, DraftVocabulary())
    proposer = make_proposer(SpeculativeConfig.of("draft_model", fallback="ngram"), supervisor)
    seq = Sequence(0, request("r", [1, 2, 3, 1, 2]), SamplingRules(), detokenizer=None)
    assert drafts(proposer, seq) == [(7, 7, 7)]
    supervisor._backoff.base_s = 60.0
    supervisor._backoff.delay_s()  # the first delay is zero
    workers[0].error = DraftFailedError("it died")
    assert drafts(proposer, seq) == [(3, 1, 2)]
    assert drafts(proposer, seq) == [(3, 1, 2)]
    supervisor.close()


def test_a_draft_worker_that_died_between_steps_is_detected(start, workers):
    supervisor = DraftSupervisor(start, LIMITS, DraftVocabulary())
    workers[0].error = DraftFailedError("it died")
    supervisor.check()
    wait_until(lambda: len(workers) == 2)
    supervisor.close()


def test_a_target_is_replaced_and_a_crash_loop_is_ended(workers):
    def start():
        if 1 < len(workers) < 4:
            workers.append(None)
            raise TargetFailedError("it does not load")
        workers.append(Worker())
        return workers[-1]

    supervisor = TargetSupervisor(start)
    supervisor._backoff.base_s = 0.001
    second = supervisor.restart()
    assert workers[0].is_killed
    assert supervisor.current is second
    third = supervisor.restart()  # after two failed starts
    assert len(workers) == 5
    assert supervisor.current is third
    assert supervisor.num_restarts == 2
    for _ in range(MAX_FAILURES - 4):
        supervisor.restart()
    with pytest.raises(TargetFailedError, match=f"failed {MAX_FAILURES} times in a row"):
        supervisor.restart()
    assert workers[-1].is_killed
    supervisor.close()


def test_forgiven_losses_do_not_make_a_crash_loop(start, workers):
    supervisor = TargetSupervisor(start)
    supervisor._backoff.base_s = 0.001
    for _ in range(2 * MAX_FAILURES):
        supervisor.restart()
        supervisor.restart()
        supervisor.forgive_losses()
    for _ in range(MAX_FAILURES):
        supervisor.restart()
    with pytest.raises(TargetFailedError, match="in a row"):
        supervisor.restart()
    supervisor.close()


def test_no_profile_touches_a_lost_target(workers):
    """The sockets of a lost target are closed."""

    def start():
        workers.append(ProfiledWorker())
        return workers[-1]

    order = WorkerProfileOrder("target", 4, "nowhere", 1)
    supervisor = TargetSupervisor(start)
    assert supervisor.num_ranks == 2
    supervisor.begin_profile(order)
    assert supervisor.collect_profile() is None
    supervisor.mark_lost()
    assert supervisor.num_ranks == 0
    supervisor.begin_profile(order)
    supervisor.end_profile()
    assert supervisor.collect_profile() == ()
    assert workers[0].calls == ["begin", "collect"]
    supervisor.restart()
    assert supervisor.num_ranks == 2
    assert supervisor.collect_profile() == (), "the profile belonged to the lost group"
    supervisor.begin_profile(order)
    assert supervisor.collect_profile() is None
    assert workers[1].calls == ["begin", "collect"]
    supervisor.close()


def test_closing_ends_the_wait_for_another_target(start, workers):
    supervisor = TargetSupervisor(start)
    supervisor._backoff.base_s = 60.0
    supervisor._backoff.delay_s()
    ended = threading.Event()

    def restart():
        with pytest.raises(TargetFailedError, match="shutting down"):
            supervisor.restart()
        ended.set()

    threading.Thread(target=restart).start()
    wait_until(lambda: workers[0].is_killed)
    supervisor.close()
    assert ended.wait(30)
