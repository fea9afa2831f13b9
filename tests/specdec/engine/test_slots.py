# Modules: specdec.engine.scheduling.drafting
"""Lossless drafts where slots of single sequences are left out, in the real engine."""

from dataclasses import replace

import pytest

from specdec.config.engine import AdapterLimits
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.config.speculation.target_lookup import with_lookup_on_ranks
from specdec.engine.scheduling.draft_planner import DraftPlanner
from specdec.speculation.policy.cost_model import CostModel
from specdec.speculation.policy.cost_table import CostTable
from specdec.speculation.policy.goodput import GoodputChooser
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.types.control import SpeculationControl
from specdec.types.drafts.draft_decision import Decision, DecisionReason, chain
from specdec.types.drafts.draft_survival import AcceptanceHistory
from specdec.types.drafts.slot_rule import SlotRule
from specdec.types.sampling.sampling_params import SpeculationOptions, StructuredOutput
from specdec.worker import HeadFiles, LocalTarget
from specdec.worker.device.plan import StepPlanner
from tests.specdec.adapters import varied_adapter_dirs
from tests.specdec.engines import (
    draft_model,
    engine_config,
    local_engine,
    make_engine,
    request,
    tokens_by,
    with_adapter,
)
from tests.specdec.fakes import run_ranks
from tests.specdec.grammars import grammar_compiler
from tests.specdec.heads import fitted_medusa_dir
from tests.specdec.worker.device.runners import device_runner

NUM_DRAFTS = 3
PIECES = [[11, 12, 13], [21, 22], [31, 32, 33, 34], [5, 6, 7], [8, 9], [41], [51, 52, 53], [61, 62]]


class DividingChooser(GoodputChooser):
    """Leaves out, in every step, the slots that a rule leaves out."""

    def __init__(self):
        super().__init__(CostModel(CostTable((1,), (0,), ((1.0,),))), divides_slots=True)
        self.outcomes = []
        self.seen = []  # histories, as often as they are due
        self.num_rows = []

    def choose(self, now_s, num_decoding, shapes, prompts):
        rule = SlotRule(0.3, AcceptanceHistory(2.0, 1.2))
        return Decision(chain(NUM_DRAFTS), DecisionReason.GOODPUT, slots=rule)

    def observe_drafts(self, num_asked, num_accepted, now_s, tree_size=0, *, num_drafts=1):
        self.outcomes += [(num_asked, num_accepted)] * num_drafts

    def observe_step(self, num_decoding, shape, timing, *, is_typical):
        self.seen.append(self.slots._histories)
        self.num_rows.append(timing.num_rows)


def requests(temperature, num_speculative_tokens=None, **params):
    return [
        request(
            f"r{index}",
            piece * 5,
            temperature=temperature,
            seed=index,
            max_tokens=24,
            speculation=SpeculationOptions(num_speculative_tokens=num_speculative_tokens),
            **params,
        )
        for index, piece in enumerate(PIECES)
    ]


def policy_of(chooser):
    control = SpeculationControl("auto", 64, NUM_DRAFTS)
    return SpeculationPolicy(control, lambda: 0.0, choosers={None: chooser})


def engine_of(directory, group, speculation, chooser, **parts):
    config = replace(engine_config(NUM_DRAFTS), speculation=speculation, async_scheduling=True)
    return local_engine(directory, config, group, policy=policy_of(chooser), **parts)


def parts_of(method, directory, group, medusa_dir):
    if method == "draft_model":
        return {"proposer": draft_model(directory, group)}
    return {"head": HeadFiles(medusa_dir)} if method == "medusa" else {}


@pytest.fixture(scope="module")
def plain(tiny_model_dir):
    """Return the tokens without drafts, by temperature."""
    return {
        temperature: tokens_by(
            local_engine(tiny_model_dir, engine_config(0)), requests(temperature)
        )
        for temperature in (0.0, 0.8)
    }


@pytest.fixture(scope="module")
def medusa_dir(tiny_model_dir, tmp_path_factory, plain):
    texts = [piece * 5 + plain[0.0][f"r{index}"] for index, piece in enumerate(PIECES)]
    return fitted_medusa_dir(tiny_model_dir, tmp_path_factory.mktemp("medusa"), texts)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model", "medusa"])
def test_tokens_are_those_without_drafts(
    tiny_model_dir, medusa_dir, plain, method, temperature, num_ranks
):
    keys = {"prompt_lookup_min": 1} if method == "ngram" else {}
    keys |= {"model": str(medusa_dir)} if method == "medusa" else {}
    speculation = SpeculativeConfig.of(method, NUM_DRAFTS, **keys)

    def generated(group):
        chooser = DividingChooser()
        parts = parts_of(method, tiny_model_dir, group, medusa_dir)
        engine = engine_of(tiny_model_dir, group, speculation, chooser, **parts)
        return tokens_by(engine, requests(temperature)), chooser

    for tokens, chooser in run_ranks(num_ranks, generated):
        assert tokens == plain[temperature]
        if temperature == 0.0:
            assert any(num_accepted for _, num_accepted in chooser.outcomes)
        assert min(each for each in chooser.num_rows if each is not None) < NUM_DRAFTS


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", ["ngram", "medusa"])
def test_a_device_runs_no_row_that_was_left_out(
    tiny_model_dir, medusa_dir, plain, monkeypatch, method, temperature
):
    """In steps begun ahead, where padding costs more than launches."""
    monkeypatch.setattr("specdec.worker.device.plan.most_padding_tokens", lambda hidden_size: 0)
    num_tokens, padded = [], StepPlanner.plan

    def plan(self, columns, states):
        made = padded(self, columns, states)
        if made.ragged is not None and not columns.has_prompts:
            num_tokens.append((made.ragged.num_tokens, made.shape.num_rows * made.shape.query_len))
        return made

    monkeypatch.setattr(StepPlanner, "plan", plan)
    keys = {"model": str(medusa_dir)} if method == "medusa" else {"prompt_lookup_min": 1}
    speculation = with_lookup_on_ranks(SpeculativeConfig.of(method, NUM_DRAFTS, **keys))
    config = replace(engine_config(NUM_DRAFTS), speculation=speculation, async_scheduling=True)
    head = medusa_dir if method == "medusa" else None
    target = LocalTarget(device_runner(tiny_model_dir, config, head=head))
    policy = policy_of(chooser := DividingChooser())
    engine = make_engine(tiny_model_dir, config, target, policy=policy)
    assert tokens_by(engine, requests(temperature)) == plain[temperature]
    assert any(num_run < num_padded for num_run, num_padded in num_tokens)
    assert min(each for each in chooser.num_rows if each is not None) < NUM_DRAFTS


@pytest.mark.parametrize("method", ["ngram", "medusa"])
def test_adapters_and_grammars_keep_their_tokens(
    tiny_model_dir, medusa_dir, tmp_path_factory, method
):
    adapters = varied_adapter_dirs(tmp_path_factory.mktemp("adapters"), tiny_model_dir)
    spec = StructuredOutput(regex="(ab|cd){4,30}")
    grammar = grammar_compiler(tiny_model_dir).compile(spec)

    def generated(**parts):
        config = replace(
            engine_config(NUM_DRAFTS),
            async_scheduling=True,
            adapters=AdapterLimits(max_loras=4, max_rank=16, max_loaded=8),
            speculation=parts.pop("speculation", None),
        )
        engine = local_engine(tiny_model_dir, config, adapters=adapters, **parts)
        plain, *constrained = requests(0.8)[:4], *requests(0.8, structured_output=spec)[4:]
        asked = [with_adapter(engine, *each) for each in zip(plain, ["", *adapters], strict=True)]
        return tokens_by(engine, asked + [replace(each, grammar=grammar) for each in constrained])

    keys = {"model": str(medusa_dir)} if method == "medusa" else {"prompt_lookup_min": 1}
    speculation = SpeculativeConfig.of(method, NUM_DRAFTS, **keys)
    policy = policy_of(chooser := DividingChooser())
    parts = parts_of(method, tiny_model_dir, None, medusa_dir)
    assert generated(speculation=speculation, policy=policy, **parts) == generated()
    assert min(each for each in chooser.num_rows if each is not None) < NUM_DRAFTS


def test_slots_follow_acceptance_and_count_as_rejected(tiny_model_dir):
    """The policy observes the outcome of whole drafts, and the rows that were run."""
    speculation = SpeculativeConfig.of("ngram", NUM_DRAFTS, prompt_lookup_min=1)
    chooser = DividingChooser()
    engine = engine_of(tiny_model_dir, None, speculation, chooser)
    tokens_by(engine, requests(0.0))
    whole = [each for each in chooser.outcomes if each[0] == NUM_DRAFTS]
    assert len(whole) > 0.8 * len(chooser.outcomes)
    rates = {each.rate for seen in chooser.seen for each in seen}
    assert max(rates) > 1.5 * min(rates)
    assert len(set(chooser.num_rows)) > 3


def test_a_number_in_the_request_is_no_draft_that_the_policy_divides(tiny_model_dir):
    speculation = SpeculativeConfig.of("ngram", NUM_DRAFTS, prompt_lookup_min=1)
    engine = engine_of(tiny_model_dir, None, speculation, chooser := DividingChooser())
    asked = requests(0.0, num_speculative_tokens=2)
    tokens_by(engine, asked)
    assert {num_asked for num_asked, _ in chooser.outcomes} <= {1, 2}


def test_the_length_of_a_row_is_computed_once(tiny_model_dir, monkeypatch):
    num_planned, num_computed = [], []
    plan, length = DraftPlanner.plan, SlotRule.length

    def counted_plan(self, sequences, most=None):
        num_planned.append(len(sequences))
        return plan(self, sequences, most)

    def counted_length(self, history, most):
        num_computed.append(1)
        return length(self, history, most)

    monkeypatch.setattr(DraftPlanner, "plan", counted_plan)
    monkeypatch.setattr(SlotRule, "length", counted_length)
    speculation = SpeculativeConfig.of("ngram", NUM_DRAFTS, prompt_lookup_min=1)
    engine = engine_of(tiny_model_dir, None, speculation, DividingChooser())
    tokens_by(engine, requests(0.0))
    assert 0 < len(num_computed) <= sum(num_planned)
