"""Tests of the policy that a configuration selects, with costs of the tiny model."""

import pytest

from specdec.config.speculation.method_config import DraftPlace
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.speculation.policy.cost_table import CostTable
from specdec.speculation.policy.factory import _main_place, make_policy
from specdec.types.drafts.draft_decision import DecisionReason
from specdec.worker import LocalTarget, load_runner
from tests.specdec.engines import engine_config


def no_time(most, budget_s):
    return CostTable((1,), (0,), ((1e-9,),))


@pytest.fixture
def make(tiny_model_dir, monkeypatch):
    monkeypatch.setattr("specdec.speculation.policy.factory._VERIFICATION_BUDGET_S", 0.2)

    def make(speculation):
        config = engine_config(speculation=speculation)
        target = LocalTarget(load_runner(tiny_model_dir, "float32", config, TensorParallelGroup()))
        control = SpeculativeConfig.of().control if speculation is None else speculation.control
        return make_policy(
            control, config, target, None, None, lambda: True, 4, measure_engine=no_time
        )

    return make


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, DecisionReason.GOODPUT),
        ({"policy": "threshold"}, DecisionReason.THRESHOLD),
        ({"num_speculative_tokens_per_batch_size": ((1, 8, 2),)}, DecisionReason.TABLE_ROW),
    ],
)
def test_each_policy_decides(make, changes, reason):
    policy = make(SpeculativeConfig.of("ngram", **changes))
    assert policy.decide(2).reason is reason
    assert (policy.capacity_tokens_per_s is not None) == (reason is DecisionReason.GOODPUT)


HEAD = {"method": "medusa", "model": "head"}


@pytest.mark.parametrize(
    ("keys", "place"),
    [
        ({"method": "ngram", "fallback": "suffix"}, DraftPlace.ENGINE),
        ({"method": "draft_model", "first": "ngram"}, DraftPlace.DRAFT_WORKER),
        ({**HEAD, "first": "ngram"}, DraftPlace.TARGET),
        ({**HEAD, "fallback": {"method": "draft_model"}}, DraftPlace.TARGET),
        ({"method": "draft_model", "fallback": HEAD}, DraftPlace.DRAFT_WORKER),
    ],
)
def test_the_first_model_decides_what_a_step_costs(keys, place):
    assert _main_place(SpeculativeConfig.of(**keys)) is place


@pytest.mark.parametrize(
    ("keys", "num_held"),
    [
        (HEAD, 3),
        ({**HEAD, "num_draft_tree_tokens": 6}, 6),
        ({**HEAD, "adaptive_length": True}, 8),
        ({**HEAD, "batch_budget": True}, 0),
        ({**HEAD, "first": "ngram"}, 0),
        ({"method": "ngram"}, 0),
    ],
)
def test_the_engine_overlaps_the_drafts_that_the_ranks_hold(make, monkeypatch, keys, num_held):
    found = []

    def spied(steps, engine, *, overlaps, num_held_drafts):
        found.append((overlaps, num_held_drafts))
        return steps.steps

    monkeypatch.setattr("specdec.speculation.policy.factory.with_engine", spied)
    speculation = SpeculativeConfig.of(**keys)
    make(speculation)
    assert {count for _, count in found} == {num_held}
    assert speculation.holds_drafts == (num_held > 0)


def test_without_speculation_there_is_no_policy(make):
    assert make(None) is None
