"""Tests of the measurement of asynchronous drafting on separate cores."""

import os

import pytest

from benchmarks import async_drafting
from benchmarks.async_drafting import OffCost, Pinned, Row
from benchmarks.drafting_engines import (
    LIMITS,
    MODES,
    NO_DRAFTER,
    SWITCHED_OFF,
    Run,
    local_target,
)
from benchmarks.pinned_draft import PinnedRanks, draft_spec
from cluster.workers.groups.roles import DRAFT
from cluster.workers.groups.worker_group import WorkerGroup


def test_the_best_number_of_each_mode_is_compared():
    rows = [
        Row("off", 1, 10.0, 0.0),
        Row("off", 3, 12.0, 0.0),
        Row("continuing", 1, 13.0, 0.5),
        Row("outcomes", 2, 18.0, 0.8),
    ]
    off = OffCost.of(Run("", 1, [9.0, 10.0, 11.0]), Run("", 1, [10.0, 10.0, 10.0]))
    faster, of_off = async_drafting._bars(rows, off)
    assert (faster.figure, faster.is_met) == (1.5, True)
    assert (of_off.figure, of_off.is_met) == (1.0, True)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_model_in_another_process_hits_and_is_idle_when_it_is_off(
    tiny_model_dir, temperature
):
    """The draft model is the int8 copy, most of whose tokens are the target's."""
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
    assert runs[0].counts.ahead.hits == {}
    assert all(run.draft_cpu_s < 0.02 < runs[2].draft_cpu_s for run in plain), "it is idle"
    assert Row.of(runs[2]).hit_rate > 0.5
