"""A rank's part in a profile, on a real runner; its messages, and the Router's end of them."""

import pytest

from cluster.shard_profile import (
    END,
    ProfileInbox,
    ShardOrder,
    ShardProfiling,
    is_about_profiles,
    is_report,
)
from cluster.wire import STOP, encode_step
from specdec.parallel import TensorParallelGroup
from specdec.profile import OperationTime, WorkerProfile
from specdec.runner import load_runner
from specdec.step import StepInput
from tests.specdec.engines import engine_config

NOTHING = StepInput(-1, (), (), (), ())


@pytest.fixture
def runner(tiny_model_dir):
    return load_runner(tiny_model_dir, "float32", engine_config(0), TensorParallelGroup(), None)


@pytest.fixture
def rank(runner):
    return ShardProfiling(1, runner)


def order(directory, num_steps=2, max_bytes=2**24):
    return ShardOrder("draft model", num_steps, str(directory), max_bytes)


def run_step(rank, runner):
    return rank.run_step(lambda: runner.execute(NOTHING))


def read(order_, frames, size=1):
    assert is_report(frames)
    inbox = ProfileInbox(order_, size)
    inbox.take(frames)
    return inbox.reports


def test_messages_of_steps_are_told_from_those_of_profiles(tmp_path):
    for frames in (STOP, encode_step(NOTHING)):
        assert not is_about_profiles(frames)
        assert not is_report(frames)
    for frames in (END, order(tmp_path).encode()):
        assert is_about_profiles(frames)


def test_it_ends_by_itself_after_its_steps(rank, runner, tmp_path):
    wanted = order(tmp_path / "new")
    assert rank.heed(wanted.encode()) is None
    assert run_step(rank, runner) is None
    [report] = read(wanted, run_step(rank, runner))
    assert (report.worker, report.rank, report.num_steps, report.fault) == ("draft model", 1, 2, "")
    trace = tmp_path / "new" / "draft-model-rank-1.json.gz"
    assert (report.trace_path, report.trace_bytes) == (str(trace), trace.stat().st_size)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert report.operations[0].total_ms > 0
    assert not rank.is_running
    assert rank.heed(END) is None, "there is nothing left to end"


def test_it_ends_when_it_is_told_to(rank, runner, tmp_path):
    wanted = order(tmp_path, num_steps=9)
    rank.heed(wanted.encode())
    run_step(rank, runner)
    [report] = read(wanted, rank.heed(END))
    assert (report.num_steps, report.fault) == (1, "")


def test_a_trace_beyond_its_limit_is_named(rank, runner, tmp_path):
    wanted = order(tmp_path, num_steps=1, max_bytes=9)
    rank.heed(wanted.encode())
    [report] = read(wanted, run_step(rank, runner))
    assert (report.trace_path, report.trace_bytes) == ("", 0)
    assert report.fault == "the trace is larger than 9 bytes"


def test_a_directory_that_cannot_be_is_reported_and_steps_go_on(rank, runner, tmp_path):
    (tmp_path / "file").write_text("in the way")
    wanted = order(tmp_path / "file")
    [report] = read(wanted, rank.heed(wanted.encode()))
    assert "FileExistsError" in report.fault
    assert not rank.is_running
    runner.execute(NOTHING)


def test_reports_are_waited_for_and_those_of_earlier_orders_are_dropped(tmp_path):
    wanted = order(tmp_path)
    inbox = ProfileInbox(wanted, 2)
    profiles = [wanted_profile(rank) for rank in (1, 0)]
    inbox.take(order(tmp_path / "before").report(profiles[0]))
    for each in profiles:
        assert inbox.reports is None
        inbox.take(wanted.report(each))
    assert inbox.reports == (profiles[1], profiles[0])


def wanted_profile(rank):
    return WorkerProfile("target", rank, 3, "/x", 5, (OperationTime("a", 1, 0.5, 1.5, 0.0),))
