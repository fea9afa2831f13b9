"""Steps of a rank whose device runs one while the next is begun."""

import re
from dataclasses import replace

import pytest

from cluster.workers.messages import serialization
from cluster.workers.messages.profile_messages import WorkerProfileOrder
from cluster.workers.rank.target_steps import TargetSteps
from cluster.workers.rank.worker import ModelWorker
from specdec.types.messages import (
    PENDING_TOKEN,
    BlockTableDelta,
    SequenceAdmission,
    StepInput,
    StepRow,
)
from specdec.types.sampling.sampling_spec import SamplingRules
from specdec.worker import RankComparison, RankMismatchError
from specdec.worker.device.input.buffers import PendingTokens
from tests.specdec.engines import engine_config
from tests.specdec.fakes import run_ranks
from tests.specdec.worker.device.runners import device_runner

PROMPT = (5, 6, 7)


def message(step_id, *, released=False):
    """Return the message of a prompt, or of the decode after the step before."""
    if step_id == 0:
        admission = SequenceAdmission(0, len(PROMPT), SamplingRules(temperature=0.8, seed=3))
        table = BlockTableDelta(0, 0, (0, 1, 2))
        step = StepInput(0, (), (admission,), (table,), (StepRow(0, 0, PROMPT, 0, True),))
    else:
        row = StepRow(0, len(PROMPT) + step_id - 1, (PENDING_TOKEN,), 0, True, max_end=9)
        step = StepInput(step_id, (0,) if released else (), (), (), () if released else (row,))
    return serialization.encode_step(step)


@pytest.fixture
def runner(tiny_model_dir):
    return device_runner(tiny_model_dir, engine_config(0))


@pytest.fixture
def expected(tiny_model_dir):
    """Return the tokens of four steps, each of which ends before the next."""
    steps = TargetSteps(device_runner(tiny_model_dir, engine_config(0)), 0)
    return [tokens_of(answer) for index in range(4) for answer in steps(message(index), no)]


def no():
    return False


def yes():
    return True


def tokens_of(answer):
    output = serialization.decode_output(answer)
    return output.step_id, [row.token_ids for row in output.rows]


def test_a_step_begins_after_another_whose_message_came_first(runner, expected):
    steps = TargetSteps(runner, 0)
    assert list(steps(message(0), yes)) == []
    assert runner.num_in_flight == 1
    answers = list(steps(message(1), yes))  # the oldest is answered, the next message is read
    assert runner.num_in_flight == 1
    answers += steps(message(2), yes)
    answers += steps(message(3), no)
    assert runner.num_in_flight == 0
    assert [tokens_of(each) for each in answers] == expected


def test_it_waits_for_the_device_or_a_message(runner, monkeypatch):
    slept = []
    monkeypatch.setattr(PendingTokens, "is_done", property(lambda _: len(slept) == 3))
    assert len(list(TargetSteps(runner, 0, slept.append)(message(0), no))) == 1
    assert len(slept) == 3
    monkeypatch.setattr(PendingTokens, "is_done", False)
    arrived = iter([False, False, True])
    assert list(TargetSteps(runner, 0, slept.append)(message(1), lambda: next(arrived))) == []
    assert len(slept) == 5


def test_a_step_that_the_device_cannot_begin_follows_the_one_in_flight(runner, expected):
    """A step without rows runs on the host, which releases sequences."""
    steps = TargetSteps(runner, 0)
    assert list(steps(message(0), yes)) == []
    answers = [tokens_of(each) for each in steps(message(1, released=True), yes)]
    assert answers == [expected[0], (1, [])]


def test_a_profile_waits_for_the_step_in_flight(runner, expected, tmp_path):
    steps = TargetSteps(runner, 0)
    worker = ModelWorker(runner, steps, 0, steps.finish)
    assert list(worker.run(message(0), yes)) == []
    order = WorkerProfileOrder("target", 1, str(tmp_path), 2**24)
    [answer] = worker.run(order.encode(), no)
    assert tokens_of(answer) == expected[0]
    answer, _report = worker.run(message(1), yes)
    assert tokens_of(answer) == expected[1]
    assert runner.num_in_flight == 0


def test_several_ranks_begin_a_step_after_another(tiny_model_dir, expected):
    """One rank has a result before the next message arrives, and the other one has not."""

    def on_rank(group):
        runner = device_runner(tiny_model_dir, engine_config(0), group=group)
        steps = TargetSteps(runner, group.rank)
        answers = list(steps(message(0), [yes, no][group.rank]))
        assert runner.num_in_flight == 1 - group.rank
        assert not runner.needs_results(serialization.decode_step(message(1)))
        for index in (1, 2):
            answers += steps(message(index), yes)
            assert runner.num_in_flight == 1
        answers += steps(message(3), no)
        return [tokens_of(answer) for answer in answers]

    assert run_ranks(2, on_rank) == [expected] * 2


def with_other_token(output):
    [row] = output.rows
    return replace(output, rows=(row._replace(token_ids=(row.token_ids[0] + 1,)),))


def test_ranks_compare_their_answers(tiny_model_dir, expected):
    def on_rank(group):
        runner = device_runner(tiny_model_dir, engine_config(0), group=group)
        comparison = RankComparison.of(group, is_wanted=True)
        steps = TargetSteps(runner, group.rank, comparison=comparison)
        answers = [tokens_of(each) for index in range(2) for each in steps(message(index), no)]
        if group.rank == 1:  # as after an error of its device
            collect = runner.collect
            runner.collect = lambda: with_other_token(collect())
        with pytest.raises(RankMismatchError) as error:
            list(steps(message(2), no))
        return answers, str(error.value)

    (answers, error), other = run_ranks(2, on_rank)
    assert other == (answers, error)
    assert answers == expected[:2]
    assert re.fullmatch(
        r"rank 1 has computed token \d+ at position 5 of sequence 0, and rank 0 token \d+ at "
        "position 5 of sequence 0",
        error,
    )
