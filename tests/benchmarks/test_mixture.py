"""The benchmark of a mixture of experts runs its cases on a small model."""

import itertools

import pytest

from benchmarks.mixture import StepCost, bars, measure_costs, write_model
from benchmarks.transformers_speed import Round
from specdec.models.config.model_config import ModelConfig
from specdec.worker import TargetModelRunner


def test_steps_of_text_are_measured_beside_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.mixture._NUM_ROUNDS", 1)
    monkeypatch.setattr("benchmarks.mixture._PROFILE_BUDGET_S", 1000)
    write_model(tmp_path, num_layers=1, width=32, num_experts=8)
    assert ModelConfig.from_directory(tmp_path).experts.num_per_token == 2
    texts = set()
    execute = TargetModelRunner.execute

    def recorded(runner, step):
        texts.update(row.token_ids for row in step.rows if not row.samples)
        return execute(runner, step)

    monkeypatch.setattr(TargetModelRunner, "execute", recorded)
    ticks = itertools.count()
    costs = measure_costs(tmp_path, lambda: float(next(ticks)), [(1, 0), (4, 8)])
    assert [(each.num_sequences, each.num_draft_tokens) for each in costs] == [(1, 0), (4, 8)]
    assert [each.observed_s for each in costs] == [1.0, 1.0]
    assert len(texts) == 64 + 16, "the prompts, and the text of the profiler"


def test_bars_are_the_worst_deviation_and_the_median_speed():
    costs = [StepCost(1, 0, 1.0, 1.05), StepCost(4, 8, 1.08, 1.0)]
    rounds = [Round(10.0, 29.0, 0.0), Round(10.0, 31.0, 0.0), Round(10.0, 35.0, 0.0)]
    worst, speed = bars(costs, rounds)
    assert worst.figure == pytest.approx(0.08)
    assert worst.is_met
    assert speed.figure == pytest.approx(3.1)
    assert speed.is_met
