"""Tests of the policy that a configuration selects, with costs of the tiny model."""

import pytest

from specdec.config.engine import DraftLimits
from specdec.config.speculation.method_config import DraftPlace
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.engine_profiler import EngineProfiler
from specdec.engine.executor import SpeculationFactory
from specdec.engine.memory.memory_plan import MemoryPlan
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.speculation.policy.cost_profiler import CostProfiler, TargetCosts, with_engine
from specdec.speculation.policy.cost_table import CostTable
from specdec.speculation.policy.factory import (
    ProfiledModels,
    _main_place,
    make_policy,
    measure_costs,
)
from specdec.text.tokenizer import Tokenizer
from specdec.types.drafts.draft_decision import DecisionReason, DraftAhead, chain
from specdec.types.drafts.draft_tree import MAX_TREE_NODES
from specdec.worker import LocalTarget, RankModel, load_target
from tests.specdec.engines import engine_config


def no_time(most, budget_s):
    return CostTable((1,), (0,), ((1e-9,),))


@pytest.fixture
def make(tiny_model_dir, monkeypatch):
    monkeypatch.setattr("specdec.speculation.policy.factory._VERIFICATION_BUDGET_S", 0.2)

    def make(speculation, profiler=None, **changes):
        config = engine_config(speculation=speculation, **changes)
        target = LocalTarget(
            load_target(RankModel(tiny_model_dir, "float32", config), TensorParallelGroup())
        )
        control = SpeculativeConfig.of().control if speculation is None else speculation.control
        measure_engine = profiler(config).measure if profiler else no_time
        return make_policy(control, config, ProfiledModels(target, measure_engine))

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
    assert (policy.service_curve is not None) == (reason is DecisionReason.GOODPUT)


HEAD = {"method": "medusa", "model": "head"}
CHOICES = tuple((0,) * depth for depth in (1, 2, 3)) + tuple((rank,) for rank in range(1, 10))


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


@pytest.mark.parametrize(("keys", "smaller"), [({}, [7]), ({"medusa_choices": CHOICES}, [])])
def test_trees_of_a_given_shape_have_one_size(make, keys, smaller):
    keys = {**HEAD, "num_speculative_tokens": 3, "num_draft_tree_tokens": 12, **keys}
    shapes = make(SpeculativeConfig.of(**keys))._shapes(1)
    assert [each.num_draft_tokens for each in shapes if each.is_tree] == [12, *smaller]


def test_the_largest_tree_costs_more_than_the_longest_chain(make, tiny_model_dir, monkeypatch):
    """No chain is as long as it, so the engine's part is not measured with it."""
    found = []

    def spied(steps, engine, **options):
        found.append(engine)
        return with_engine(steps, engine, **options)

    def profiler(config):
        model, tokenizer = ModelConfig.from_directory(tiny_model_dir), Tokenizer(tiny_model_dir)
        return EngineProfiler(config, model, tokenizer)

    monkeypatch.setattr("specdec.speculation.policy.factory.with_engine", spied)
    keys = {**HEAD, "num_speculative_tokens": 4, "num_draft_tree_tokens": MAX_TREE_NODES}
    policy = make(SpeculativeConfig.of(**keys), profiler, max_num_batched_tokens=256)
    assert policy.decide(2).reason is DecisionReason.GOODPUT
    for engine in found:
        assert engine.step_s(4, MAX_TREE_NODES) > engine.step_s(4, 32) >= engine.step_s(4, 4) > 0


@pytest.mark.parametrize(
    ("keys", "left_out_s"),
    [(HEAD, 1.25), ({**HEAD, "batch_budget": False}, 1.0), ({**HEAD, "first": "ngram"}, 1.25)],
)
def test_slots_that_a_head_leaves_out_save_verification_alone(make, monkeypatch, keys, left_out_s):
    """Only where they may be left out is the verification measured without the head."""

    def verification(profiler, target, budget_s):
        steps = CostTable((1,), (0, 3), ((1.0, 1.75 if profiler.with_head else 1.5),))
        return TargetCosts(steps, steps)

    monkeypatch.setattr(CostProfiler, "verification", verification)
    policy = make(SpeculativeConfig.of(**keys))
    costs = policy._choosers["medusa"]._costs
    assert costs.step_s(1, chain(3), 0.0) == pytest.approx(1.75)
    assert costs.step_s(1, chain(3), 0.0, 0) == pytest.approx(left_out_s)


EAGLE3_CASCADE = {
    "method": "eagle3",
    "model": "head",
    "fallback": {"method": "draft_model", "async_drafting": "auto"},
}


@pytest.fixture
def measured(monkeypatch):
    """Return what was measured: whether with a head, and the budget. Milliseconds: 16 and 11."""
    found = []

    def verification(profiler, target, budget_s):
        found.append((profiler.with_head, budget_s))
        drafted_s = 0.016 if profiler.with_head else 0.011
        steps = CostTable((1,), (0, 3), ((0.010, drafted_s),))
        return TargetCosts(steps, steps)

    monkeypatch.setattr(CostProfiler, "verification", verification)
    return found


def measure(keys, **options):
    """Return the costs by method, with a draft model that takes 2 ms for 3 tokens."""
    speculation = SpeculativeConfig.of(**keys)
    config = engine_config(speculation=speculation)
    limits = DraftLimits(num_blocks=64, block_size=16, max_model_len=64, max_catch_up_tokens=64)
    draft = lambda function: CostTable((1,), (1, 3), ((0.001, 0.002),)), limits
    models = ProfiledModels(None, no_time, *(draft if speculation.draft_model else ()))
    return measure_costs(speculation, config, models, **options)


@pytest.mark.parametrize("divides_slots", [False, True])
def test_a_head_drafts_beside_drafts_ahead(measured, divides_slots):
    costs = measure(EAGLE3_CASCADE, divides_slots=divides_slots)
    shapes = [chain(3).with_ahead(each) for each in DraftAhead]
    found = {
        name: [each.model(0).step_s(1, shape, 0.0) for shape in shapes]
        for name, each in costs.items()
    }
    with_head, of_model = [0.016] * 3, [0.013, 0.011, 0.011]
    for name, seconds in {None: with_head, "eagle3": with_head, "draft_model": of_model}.items():
        assert found[name] == pytest.approx(seconds), name


@pytest.mark.parametrize(
    ("keys", "divides_slots", "budgets"),
    [
        (HEAD, False, {(True, 2.0)}),
        (HEAD, True, {(True, 2.0), (False, 1.0)}),
        ({**HEAD, "first": "ngram"}, True, {(True, 2.0), (False, 2.0)}),
        (EAGLE3_CASCADE, True, {(True, 2.0), (False, 2.0)}),
        ({"method": "draft_model"}, True, {(False, 2.0)}),
        ({"method": "ngram"}, True, {(False, 2.0)}),
    ],
)
def test_the_steps_of_a_method_have_the_whole_budget(measured, keys, divides_slots, budgets):
    """Those that only show what a head's rows save have half of it, if these may be left out."""
    measure(keys, divides_slots=divides_slots)
    assert set(measured) == budgets
    assert len(measured) == len(budgets)


def test_the_trial_of_a_head_measures_only_its_steps(measured):
    config = engine_config(speculation=SpeculativeConfig.of(**HEAD))
    SpeculationFactory(MemoryPlan(config, None), None, None).measure_costs(None, no_time, ())
    assert measured == [(True, 2.0)]


def test_without_speculation_there_is_no_policy(make):
    assert make(None) is None
