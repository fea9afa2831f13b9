"""Aggregation of the rounds of benchmarks.off_cost."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import off_cost
from benchmarks.off_cost import OFF, WITHOUT, bars, halves, lower_bound, make_cases, parse, shares
from benchmarks.random_heads import HEADS
from benchmarks.workloads import Measurement, StreamRecord
from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.config import HeadConfig
from tests.specdec.tiny import tiny_llama_dir


def rate(tokens_per_s):
    return Measurement(100 / tokens_per_s, (StreamRecord((1,) * 100, (0.1,)),))


def test_a_share_is_the_median_of_the_ratios_of_the_rounds():
    measured = {}
    for count in (1, 8, 32):
        measured[f"{OFF} {count}"] = [rate(99), rate(45), rate(200)]
        measured[f"{WITHOUT} {count}"] = [rate(100), rate(50), rate(100)]
    first = shares(measured)[0]
    assert first.of_each_round == pytest.approx((0.99, 0.9, 2.0))
    assert first.median == pytest.approx(0.99)
    assert first.lower_bound == pytest.approx(0.9)
    assert [bar.is_met for bar in bars([first])] == [True, False]


def test_a_head_and_drafts_ahead_have_a_higher_bar_and_separate_reports():
    share = off_cost.Share(1, 0.985, 0.96, (0.985,))
    assert [bar.is_met for bar in bars([share])] == [True, True]
    assert [bar.is_met for bar in bars([share], is_plain=False)] == [False, True]
    assert bars([share], is_plain=False)[0].limit == 0.99
    assert parse(["--async-drafting", "auto"]).output.name == "off-cost-async-auto.json"
    assert [parse([]).async_drafting, parse(["--head", "eagle3"]).async_drafting] == ["off", "off"]
    assert [parse([]).head, parse([]).output.name] == [None, "off-cost.json"]
    assert parse(["--head", "eagle3"]).output.name == "off-cost-eagle3.json"
    assert parse(["--head", "eagle3", "--output", "here.json"]).output.name == "here.json"


@pytest.mark.parametrize("head", HEADS)
def test_the_configuration_has_a_head_of_its_method(head, tmp_path, monkeypatch):
    target = tiny_llama_dir(tmp_path / "target", layers=6)
    monkeypatch.setattr("benchmarks.random_heads.DRAFT_VOCAB", 64)
    monkeypatch.setattr(off_cost, "resolve", lambda model: target)
    config = off_cost.head_config(head, tmp_path).head
    assert config is not None
    found = HeadConfig.from_directory(Path(config.model), ModelConfig.from_directory(target))
    assert found.method == config.name == head


def test_the_bound_covers_the_median_at_its_confidence():
    """Of 200 samples of 15, at least 0.95 - 4 deviations of 0.015: a false alarm in 30,000."""
    random = np.random.default_rng(1)
    bounds = [lower_bound(random.normal(1.0, 0.05, 15).tolist(), seed) for seed in range(200)]
    assert sum(bound <= 1.0 for bound in bounds) >= 0.89 * 200
    assert np.mean(bounds) > 0.95  # and is not just far below


@pytest.mark.parametrize(("count", "each"), [(10, (5, 5)), (9, (5, 4)), (1, (1, 0))])
def test_the_rounds_are_divided_over_both_orders(count, each):
    assert halves(count) == each


def test_both_services_get_equal_prompts_and_only_one_disables_speculation():
    off, without = make_cases([(1,), (2,)], 16)[2:4]
    assert off.workloads[0].prompts == without.workloads[0].prompts == ((1,), (2,)) * 4
    assert off.workloads[0].num_open == without.workloads[0].num_open == 8
    assert [off.workloads[0].method, without.workloads[0].method] == ["as steered", "none"]


@pytest.mark.parametrize("mode", ["off", "outcomes"])
def test_the_service_that_is_switched_off_has_a_draft_worker(mode):
    """The default drafter of the model is a head, which has none to wait for."""
    model = off_cost.draft_config(mode).draft_model
    assert (model.async_drafting, model.quantization, model.model) == (mode, "int8", None)


def test_a_head_drafts_nothing_ahead(capsys):
    with pytest.raises(SystemExit):
        parse(["--head", "eagle3", "--async-drafting", "auto"])
    assert "not allowed with" in capsys.readouterr().err
