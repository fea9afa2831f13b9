"""Tests of the measurement of asynchronous drafting on separate cores, and of its simulation."""

import math
import os

import pytest

from benchmarks import async_drafting
from benchmarks.async_drafting import HitRates, OffCost, Row
from benchmarks.drafting_engines import (
    LIMITS,
    MODES,
    NO_DRAFTER,
    SWITCHED_OFF,
    Run,
    local_target,
)
from benchmarks.drafting_runs import Pinned, SimulatedRuns
from benchmarks.pinned_draft import PinnedRanks, draft_spec
from benchmarks.precisions import PRECISIONS
from benchmarks.recorded_texts import TextRecorder
from benchmarks.recordings import TextScorer
from benchmarks.timed_models import MeanTimes, ModelTimes
from cluster.workers.groups.roles import DRAFT
from cluster.workers.groups.worker_group import WorkerGroup
from tests.benchmarks.test_recorded_texts import text_of


def test_the_best_number_of_each_mode_is_compared():
    rows = [
        Row("off", 1, 10.0, 10.5, 0.0),
        Row("off", 3, 12.0, 12.0, 0.0),
        Row("continuing", 1, 13.0, 13.0, 0.5),
        Row("outcomes", 2, 18.0, 17.0, 0.8),
    ]
    hits = [HitRates("continuing", 300, 0.5, 0.51), HitRates("outcomes", 20, 0.9, 0.5)]
    off = OffCost.of(Run("", 1, [9.0, 10.0, 11.0]), Run("", 1, [10.0, 10.0, 10.0]))
    faster, distance, of_off, of_hits = async_drafting._bars(rows, hits, off)
    assert (faster.figure, faster.is_met) == (1.5, True)
    assert distance.figure == pytest.approx(1 / 18)
    assert (of_off.figure, of_off.is_met) == (1.0, True)
    assert of_hits.figure == pytest.approx(0.01), "twenty rounds show nothing"


def times_of(mode, target_s, draft_s):
    """Return the times of passes that take equally long whatever their tokens."""
    times = ModelTimes()
    times.target.observe(1, target_s)
    for count in (1, 2, 5):
        times.synchronous.observe(count, count * draft_s)
    for each in (times.first, times.levels) if mode != "off" else ():
        each.observe(1, draft_s)
    return times


@pytest.mark.parametrize("mode", MODES)
def test_a_simulated_draft_model_that_is_always_right_has_the_expected_speed(tiny_model_dir, mode):
    """Each step yields three tokens; synchronous steps also take two passes of the draft model."""
    simulated = SimulatedRuns(tiny_model_dir, {mode: times_of(mode, 0.02, 0.004)})
    run = Run(mode, 2)
    simulated.measure(run, text_of([0] * 300))
    step_s = 0.02 + (2 * 0.004 if mode == "off" else 0.0)
    assert run.median == pytest.approx(3 / step_s, rel=0.03)


def test_the_host_takes_its_time_in_each_simulated_step(tiny_model_dir):
    times = times_of("off", 0.02, 0.004)
    times.host_s, times.num_steps = 0.03, 10
    run = Run("off", 2)
    SimulatedRuns(tiny_model_dir, {"off": times}).measure(run, text_of([0] * 300))
    assert run.median == pytest.approx(3 / 0.031, rel=0.03)


def test_mean_times_are_known_between_and_beyond_the_sizes():
    times = MeanTimes()
    for size, seconds in ((1, 1.0), (1, 3.0), (3, 4.0), (5, 6.0)):
        times.observe(size, seconds)
    assert times.seconds(1) == 2.0
    assert times.seconds(2) == pytest.approx(3.0)
    assert times.seconds(9) == pytest.approx(10.0)
    assert times.means() == {1: 2.0, 3: 4.0, 5: 6.0}


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_hits_of_a_draft_model_in_another_process_are_the_expected_ones(
    tiny_model_dir, temperature
):
    """The draft model is the int8 copy: at temperature 0 each hit is known from its ranks.

    Above, hits are random: the limit is 3.5 standard errors, a false alarm of one in 2000.
    """
    spec = draft_spec(tiny_model_dir, LIMITS, "int8")
    ranks = PinnedRanks(spec, tuple(os.sched_getaffinity(0))[-1:])
    worker = WorkerGroup(DRAFT, spec, None, ranks)
    pinned = Pinned(tiny_model_dir, local_target(tiny_model_dir), worker, ranks, temperature)
    try:
        runs = [Run(mode, 2) for mode in MODES]
        for first in range(5, 9):
            for run in runs:  # `measure` compares the tokens
                pinned.measure(run, tuple(range(first, first + 25)), 120)
        plain = [Run(mode, 2) for mode in (SWITCHED_OFF, NO_DRAFTER)]
        for run in plain:
            pinned.measure(run, tuple(range(5, 30)), 120)
    finally:
        worker.close()
    target, draft = (TextScorer(tiny_model_dir, PRECISIONS[name]) for name in ("fp32", "int8"))
    recorder = TextRecorder(target, draft, tiny_model_dir)
    texts = [recorder.record(*each, temperature) for each in pinned.outputs(120).items()]
    assert runs[0].counts.ahead.hits == {}
    assert all(run.draft_cpu_s < 0.02 < runs[2].draft_cpu_s for run in plain), "it is idle"
    for each in async_drafting._hits(runs, texts):
        assert each.num_rounds > 100
        error = math.sqrt(each.expected * (1 - each.expected) / each.num_rounds)
        limit = 0.03 if temperature == 0 else max(0.03, 3.5 * error)
        assert each.measured == pytest.approx(each.expected, abs=limit)
    if temperature == 0:
        simulated = async_drafting._simulate(pinned, runs, texts)
        assert all(run.median > 0 for run in simulated)
