"""Profiles in a rank, on a real runner."""

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.workers.messages.profile_messages import (
    END,
    ProfileInbox,
    WorkerProfileOrder,
    is_report,
)
from cluster.workers.rank.worker import ModelWorker
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.types.messages import StepInput
from specdec.worker import RankModel, load_target
from tests.specdec.engines import engine_config

ROOT = Path(__file__).parents[4]
LATE_IMPORTS = """
import sys
from pathlib import Path
from cluster.observability.logs import LogConfig
from cluster.workers.group_spec import GroupSpec, ModelSource
from cluster.workers.rank.worker import load_worker, prepare_to_load
from specdec.config.engine import DraftLimits

model = ModelSource(sys.argv[1], Path(sys.argv[1]))
limits = DraftLimits(num_blocks=20, block_size=4, max_model_len=80, max_catch_up_tokens=16)
spec = GroupSpec(
    "draft model", model, "float32", "cpu", None, "auto", 1, limits, 1, (2,), None, 60.0, 60.0,
    LogConfig(),
)
prepare_to_load(spec)
prepared = set(sys.modules)
load_worker(spec, 0, Path(sys.argv[1]))
print(*sorted(set(sys.modules) - prepared))
"""

STEP, ANSWER = [b"a step"], [b"an answer"]


@pytest.fixture
def rank(tiny_model_dir):
    runner = load_target(
        RankModel(tiny_model_dir, "float32", engine_config(0)), TensorParallelGroup()
    )

    def execute(frames, has_message):
        assert frames == STEP
        runner.execute(StepInput(-1, (), (), (), ()))
        yield ANSWER

    return ModelWorker(runner, execute, 1)


def order(directory, num_steps=2, max_bytes=2**24):
    return WorkerProfileOrder("draft model", num_steps, str(directory), max_bytes)


def run(rank, frames):
    return list(rank.run(frames, lambda: False))


def report_in(order_, frames):
    assert is_report(frames)
    inbox = ProfileInbox(order_, 1)
    inbox.take(frames)
    [report] = inbox.reports
    return report


def test_it_ends_after_its_steps(rank, tmp_path):
    wanted = order(tmp_path / "new")
    model = rank.runner.model
    assert run(rank, wanted.encode()) == []
    assert run(rank, STEP) == [ANSWER]
    answer, message = run(rank, STEP)
    report = report_in(wanted, message)
    assert answer == ANSWER
    assert (report.worker, report.rank, report.num_steps, report.fault) == ("draft model", 1, 2, "")
    trace = tmp_path / "new" / "draft-model-rank-1.json.gz"
    assert (report.trace_path, report.trace_bytes) == (str(trace), trace.stat().st_size)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert {each.name: each.num_calls for each in report.operations}["step"] == 2
    assert rank.runner.model is model
    assert run(rank, END) == [], "no profile is active"
    assert run(rank, STEP) == [ANSWER]


def test_an_order_replaces_an_active_profile(rank, tmp_path):
    model = rank.runner.model
    run(rank, order(tmp_path / "first", num_steps=9).encode())
    run(rank, STEP)
    wanted = order(tmp_path / "second", num_steps=1)
    assert run(rank, wanted.encode()) == []
    report = report_in(wanted, run(rank, STEP)[1])
    assert (report.num_steps, report.fault) == (1, "")
    assert rank.runner.model is model
    assert list((tmp_path / "first").iterdir()) == []


def test_it_ends_on_request(rank, tmp_path):
    wanted = order(tmp_path, num_steps=9)
    run(rank, wanted.encode())
    run(rank, STEP)
    [message] = run(rank, END)
    report = report_in(wanted, message)
    assert (report.num_steps, report.fault) == (1, "")


def test_a_trace_beyond_its_limit_is_reported(rank, tmp_path):
    wanted = order(tmp_path, num_steps=1, max_bytes=9)
    run(rank, wanted.encode())
    report = report_in(wanted, run(rank, STEP)[1])
    assert (report.trace_path, report.trace_bytes) == ("", 0)
    assert report.fault == "the trace is larger than 9 bytes"


def test_a_directory_that_cannot_be_created_is_reported_and_steps_continue(rank, tmp_path):
    (tmp_path / "file").write_text("in the way")
    wanted = order(tmp_path / "file")
    [message] = run(rank, wanted.encode())
    assert "FileExistsError" in report_in(wanted, message).fault
    assert run(rank, STEP) == [ANSWER]


def test_a_step_that_fails_fails_as_without_a_profile(rank, tmp_path):
    run(rank, order(tmp_path).encode())
    with pytest.raises(AssertionError):
        run(rank, [b"no step"])
    assert run(rank, STEP) == [ANSWER]
    run(rank, END)  # torch crashes at the end of a process with an active profiler


def test_a_prepared_rank_imports_nothing_while_it_loads(tiny_model_dir):
    command = [sys.executable, "-c", LATE_IMPORTS, str(tiny_model_dir)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
