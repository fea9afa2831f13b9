# Modules: specdec.engine.scheduling.drafting
"""Lossless drafts where slots of single sequences are left out, in the real engine."""

from dataclasses import replace

import pytest

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.speculation.policy.cost_model import CostModel
from specdec.speculation.policy.cost_table import CostTable
from specdec.speculation.policy.goodput import GoodputChooser
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.types.control import SpeculationControl
from specdec.types.drafts.draft_decision import Decision, DecisionReason, chain
from specdec.types.drafts.slot_rule import SlotRule
from specdec.types.sampling.sampling_params import SpeculationOptions
from specdec.worker import HeadFiles
from tests.specdec.engines import draft_model, engine_config, local_engine, request, tokens_by
from tests.specdec.fakes import run_ranks
from tests.specdec.heads import fitted_medusa_dir

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
        rule = SlotRule(0.3, rate=0.6, weight=2.0)
        return Decision(chain(NUM_DRAFTS), DecisionReason.GOODPUT, slots=rule)

    def observe_drafts(self, num_asked, num_accepted, now_s, *, is_tree=False, num_drafts=1):
        self.outcomes += [(num_asked, num_accepted)] * num_drafts

    def observe_step(self, num_decoding, shape, seconds, now_s, *, num_rows, **others):
        self.seen.append(self.slots._histories)
        self.num_rows.append(num_rows)


def requests(temperature, **options):
    return [
        request(
            f"r{index}",
            piece * 5,
            temperature=temperature,
            seed=index,
            max_tokens=24,
            speculation=SpeculationOptions(**options),
        )
        for index, piece in enumerate(PIECES)
    ]


def engine_of(directory, group, speculation, chooser, **parts):
    control = SpeculationControl("auto", 64, NUM_DRAFTS)
    policy = SpeculationPolicy(control, lambda: 0.0, choosers={None: chooser})
    config = replace(engine_config(NUM_DRAFTS), speculation=speculation, async_scheduling=True)
    return local_engine(directory, config, group, policy=policy, **parts)


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


def test_slots_follow_acceptance_and_count_as_rejected(tiny_model_dir):
    """The policy observes the outcome of whole drafts, and the rows that were run."""
    speculation = SpeculativeConfig.of("ngram", NUM_DRAFTS, prompt_lookup_min=1)
    chooser = DividingChooser()
    engine = engine_of(tiny_model_dir, None, speculation, chooser)
    tokens_by(engine, requests(0.0))
    assert max(num_asked for num_asked, _ in chooser.outcomes) == NUM_DRAFTS
    rates = {each.rate for seen in chooser.seen for each in seen}
    assert max(rates) > 1.5 * min(rates)
    assert len(set(chooser.num_rows)) > 3


def test_a_number_in_the_request_is_no_draft_that_the_policy_divides(tiny_model_dir):
    speculation = SpeculativeConfig.of("ngram", NUM_DRAFTS, prompt_lookup_min=1)
    engine = engine_of(tiny_model_dir, None, speculation, chooser := DividingChooser())
    asked = requests(0.0, num_speculative_tokens=2)
    tokens_by(engine, asked)
    assert {num_asked for num_asked, _ in chooser.outcomes} <= {1, 2}
