"""Profiling of a runner's steps."""

import gzip
import json

import pytest

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.types.messages import BlockTableDelta, SequenceAdmission, StepInput, StepRow
from specdec.types.sampling.sampling_spec import SamplingRules
from specdec.worker import RankModel, StepProfiler, load_target
from tests.specdec.engines import engine_config

ADMITTED = StepInput(
    0,
    (),
    (SequenceAdmission(0, 6, SamplingRules()),),
    (BlockTableDelta(0, 0, (0, 1, 2, 3)),),
    (StepRow(0, 0, (11, 12, 13, 14, 15, 16), 0, True),),
)


def decode(index):
    return StepInput(index, (), (), (), (StepRow(0, 5 + index, (20 + index,), 0, True),))


@pytest.fixture
def runner(tiny_model_dir):
    return load_target(
        RankModel(tiny_model_dir, "float32", engine_config(0)), TensorParallelGroup()
    )


def test_profile_names_steps_and_restores_the_runner(runner, tmp_path):
    model = runner.model
    plain = [runner.execute(each).rows[0].token_ids for each in (ADMITTED, decode(1), decode(2))]
    runner.execute(StepInput(3, (0,), (), (), ()))

    profiler = StepProfiler(runner)
    profiled = []
    for each in (ADMITTED, decode(1), decode(2)):
        with profiler.step():
            profiled.append(runner.execute(each).rows[0].token_ids)
    path = tmp_path / "trace.json.gz"
    saved = profiler.save(path, max_bytes=2**24)

    assert profiled == plain
    assert runner.model is model
    assert profiler.num_steps == 3
    calls = {each.name: each.num_calls for each in saved.operations}
    assert (calls["step"], calls["forward"], calls["logits"]) == (3, 3, 3)
    times = {each.name: each for each in saved.operations}
    assert times["step"].total_ms >= times["forward"].total_ms + times["logits"].total_ms
    assert path.stat().st_size == saved.size_bytes
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"step", "forward", "logits"} <= names


def test_a_trace_above_the_limit_is_not_kept(runner, tmp_path):
    profiler = StepProfiler(runner)
    with profiler.step():
        runner.execute(ADMITTED)
    saved = profiler.save(tmp_path / "trace.json.gz", max_bytes=10)
    assert saved.size_bytes == 0
    assert saved.operations
    assert list(tmp_path.iterdir()) == []
