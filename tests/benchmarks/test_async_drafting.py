"""Tests of the measurement of asynchronous drafting on separate cores."""

import os
import random

import pytest

from benchmarks import async_drafting
from benchmarks.async_drafting import Pinned, Row, Run
from benchmarks.pinned_draft import PinnedRanks, draft_spec
from benchmarks.simulated_models import Speeds
from cluster.workers.worker_group import DRAFT, WorkerGroup
from specdec.speculation.proposers.outcome_planner import OutcomeStatistics
from specdec.types.stats import Counts


def test_acceptance_counts_the_drafts_behind_accepted_ones():
    counts = Counts(drafted_by_position=(10, 10, 10), accepted_by_position=(8, 6, 3))
    assert async_drafting._acceptance(counts) == pytest.approx(17 / (10 + 8 + 6))


def test_the_exponent_is_that_of_the_ranks_that_occurred():
    weights = [rank**-1.5 for rank in range(1, 17)]
    statistics = OutcomeStatistics()
    for rank in random.Random(1).choices(range(16), weights, k=4000):
        statistics.observe(1, 0, rank, 16)
    assert async_drafting._rank_exponent(statistics) == pytest.approx(1.5, abs=0.25)


def test_the_best_number_of_each_mode_is_compared():
    rows = [
        Row("off", 1, 10.0, 10.5, 0.0),
        Row("off", 3, 12.0, 12.0, 0.0),
        Row("continuing", 1, 13.0, 13.0, 0.5),
        Row("outcomes", 2, 18.0, 17.0, 0.8),
    ]
    faster, distance = async_drafting._bars(rows)
    assert (faster.figure, faster.is_met) == (1.5, True)
    assert distance.figure == pytest.approx(1 / 18)


@pytest.mark.parametrize("mode", async_drafting.MODES)
def test_a_simulated_draft_model_that_is_always_right_has_the_expected_speed(tiny_model_dir, mode):
    """Each step yields three tokens; synchronous steps also take two passes of the draft model."""
    speeds = Speeds(0.02, 0.004)
    found = async_drafting.simulate(tiny_model_dir, Run(mode, 2), speeds, 1.0, 1.5)
    step_s = 0.02 + (2 * 0.004 if mode == "off" else 0.0)
    assert found == pytest.approx(3 / step_s, rel=0.03)


@pytest.mark.slow
def test_a_draft_model_in_another_process_drafts_ahead(tiny_model_dir):
    spec = draft_spec(tiny_model_dir, async_drafting._LIMITS, None)
    cores = tuple(os.sched_getaffinity(0))
    worker = WorkerGroup(DRAFT, spec, None, PinnedRanks(spec, cores[-1:]))
    pinned = Pinned(tiny_model_dir, async_drafting._target(tiny_model_dir), worker)
    try:
        runs = [Run(mode, 2) for mode in async_drafting.MODES]
        for run in runs:  # `measure` compares the tokens
            pinned.measure(run, tuple(range(5, 30)), 60)
    finally:
        worker.close()
    assert runs[0].counts.ahead.hits == {}
    assert runs[2].counts.ahead.hits
    speeds = async_drafting._speeds(pinned.target, pinned.outcomes.speed)
    assert min(speeds.target_s, speeds.draft_s) > 0
