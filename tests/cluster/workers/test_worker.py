"""A rank's part in a profile, on a real runner."""

import pytest

from cluster.workers.profile_messages import END, ProfileInbox, WorkerProfileOrder, is_report
from cluster.workers.worker import ModelWorker
from specdec.distributed.group import TensorParallelGroup
from specdec.types.messages import StepInput
from specdec.worker import load_runner
from tests.specdec.engines import engine_config

STEP, ANSWER = [b"a step"], [b"an answer"]


@pytest.fixture
def rank(tiny_model_dir):
    runner = load_runner(tiny_model_dir, "float32", engine_config(0), TensorParallelGroup(), None)

    def run(frames):
        assert frames == STEP
        runner.execute(StepInput(-1, (), (), (), ()))
        yield ANSWER

    return ModelWorker(runner, run, 1)


def order(directory, num_steps=2, max_bytes=2**24):
    return WorkerProfileOrder("draft model", num_steps, str(directory), max_bytes)


def tell(rank, frames):
    return list(rank.run(frames))


def report_in(order_, frames):
    assert is_report(frames)
    inbox = ProfileInbox(order_, 1)
    inbox.take(frames)
    [report] = inbox.reports
    return report


def test_it_ends_by_itself_after_its_steps(rank, tmp_path):
    wanted = order(tmp_path / "new")
    model = rank.runner.model
    assert tell(rank, wanted.encode()) == []
    assert tell(rank, STEP) == [ANSWER]
    answer, message = tell(rank, STEP)
    report = report_in(wanted, message)
    assert answer == ANSWER
    assert (report.worker, report.rank, report.num_steps, report.fault) == ("draft model", 1, 2, "")
    trace = tmp_path / "new" / "draft-model-rank-1.json.gz"
    assert (report.trace_path, report.trace_bytes) == (str(trace), trace.stat().st_size)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert {each.name: each.num_calls for each in report.operations}["step"] == 2
    assert rank.runner.model is model
    assert tell(rank, END) == [], "there is nothing left to end"
    assert tell(rank, STEP) == [ANSWER]


def test_an_order_takes_the_place_of_a_profile_that_runs(rank, tmp_path):
    model = rank.runner.model
    tell(rank, order(tmp_path / "first", num_steps=9).encode())
    tell(rank, STEP)
    wanted = order(tmp_path / "second", num_steps=1)
    assert tell(rank, wanted.encode()) == []
    report = report_in(wanted, tell(rank, STEP)[1])
    assert (report.num_steps, report.fault) == (1, "")
    assert rank.runner.model is model
    assert list((tmp_path / "first").iterdir()) == []


def test_it_ends_when_it_is_told_to(rank, tmp_path):
    wanted = order(tmp_path, num_steps=9)
    tell(rank, wanted.encode())
    tell(rank, STEP)
    [message] = tell(rank, END)
    report = report_in(wanted, message)
    assert (report.num_steps, report.fault) == (1, "")


def test_a_trace_beyond_its_limit_is_named(rank, tmp_path):
    wanted = order(tmp_path, num_steps=1, max_bytes=9)
    tell(rank, wanted.encode())
    report = report_in(wanted, tell(rank, STEP)[1])
    assert (report.trace_path, report.trace_bytes) == ("", 0)
    assert report.fault == "the trace is larger than 9 bytes"


def test_a_directory_that_cannot_be_is_reported_and_steps_go_on(rank, tmp_path):
    (tmp_path / "file").write_text("in the way")
    wanted = order(tmp_path / "file")
    [message] = tell(rank, wanted.encode())
    assert "FileExistsError" in report_in(wanted, message).fault
    assert tell(rank, STEP) == [ANSWER]


def test_a_step_that_fails_fails_as_without_a_profile(rank, tmp_path):
    tell(rank, order(tmp_path).encode())
    with pytest.raises(AssertionError):
        tell(rank, [b"no step"])
    assert tell(rank, STEP) == [ANSWER]
    tell(rank, END)  # torch crashes at the end of a process in which one still runs
