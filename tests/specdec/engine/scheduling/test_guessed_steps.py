"""Steps that begin ahead with guessed outcomes of the one in flight: suffix decoding, cascades."""

from dataclasses import dataclass, field, replace

import pytest

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.metrics.metrics import Metrics
from specdec.engine.scheduling.ahead_gain import AheadGain
from specdec.engine.scheduling.drafting import Drafting
from specdec.engine.scheduling.speculator import Speculator
from specdec.speculation.policy.cost_model import CostModel
from specdec.speculation.policy.cost_table import CostTable
from specdec.speculation.policy.goodput import GoodputChooser
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.speculation.proposers import ProposalAhead, make_proposer
from specdec.speculation.proposers.cascade import CascadeProposer, Stage
from specdec.speculation.proposers.suffix import SuffixProposer
from specdec.types.control import SpeculationControl
from specdec.types.drafts.draft_decision import Decision, DecisionReason, chain
from specdec.types.messages import StepRow
from specdec.types.sampling.sampling_params import StructuredOutput
from specdec.worker import LocalTarget
from tests.clock import Clock
from tests.specdec.engine.scheduling.test_async_scheduling import (
    answers,
    engine_on,
    repetitive_requests,
    varied_requests,
)
from tests.specdec.engines import (
    HashTarget,
    ScriptedProposer,
    draft_model,
    engine_config,
    frozen,
    local_engine,
    make_engine,
    request,
    tokens_by,
)
from tests.specdec.fakes import run_ranks
from tests.specdec.grammars import grammar_compiler
from tests.specdec.speculation.proposers.sequences import sequence
from tests.specdec.worker.device.runners import device_runner

METHODS = {
    "suffix": {"method": "suffix"},
    "suffix first": {"method": "draft_model", "first": "suffix"},
}
PROMPT = [10, 11, 12, 13, 14, 10, 11, 12]


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setattr(AheadGain, "pays", lambda gain, num_rows: True)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("changes", [{}, {"max_prefill_tokens": 5, "num_blocks": 60}], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_synchronous_scheduling(tiny_model_dir, method, changes):
    speculation = SpeculativeConfig.of(num_speculative_tokens=3, **METHODS[method])
    spec = StructuredOutput(regex="(ab|cd){4,30}")
    constrained = request("grammar", PROMPT, structured_output=spec)
    compiled = grammar_compiler(tiny_model_dir).compile(spec)
    constrained = replace(constrained, grammar=compiled)
    outcomes = {}
    for is_async in (False, True):
        drafter = draft_model(tiny_model_dir) if "draft_model" in speculation.methods else None
        config = engine_config(speculation=speculation, async_scheduling=is_async, **changes)
        proposer = make_proposer(speculation, drafter)
        engine, target = engine_on(tiny_model_dir, config, proposer=proposer)
        outcomes[is_async] = answers(
            engine, [*varied_requests(), constrained, *repetitive_requests()]
        )
        num_before = target.num_ahead
        few_kinds = request("few", PROMPT, allowed_token_ids=(10, 11), max_tokens=90)
        outcomes[is_async] |= answers(engine, [few_kinds])
        assert (target.num_ahead - num_before > 10) == is_async
        assert engine.stats().counts.speculation.num_accepted_tokens > 20
    assert outcomes[True] == outcomes[False]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_device_yields_the_same_tokens(tiny_model_dir, temperature):
    """It begins a step ahead of one with drafts where no row has a guess, else after its result."""
    few_kinds = {"allowed_token_ids": (10, 11), "max_tokens": 60, "temperature": temperature}
    asked = [request("few", PROMPT, **few_kinds), request("other", [3, 1, 4, 1, 5], **few_kinds)]
    asked.append(request("penalties", PROMPT, repetition_penalty=1.3, temperature=temperature))
    plain = tokens_by(local_engine(tiny_model_dir, engine_config()), asked)
    speculation = SpeculativeConfig.of("suffix", 3)
    config = engine_config(speculation=speculation, async_scheduling=True)
    target = LocalTarget(device_runner(tiny_model_dir, config))
    engine = make_engine(tiny_model_dir, config, target)
    assert tokens_by(engine, asked) == plain
    counts = engine.stats().counts
    assert counts.num_steps_ahead > 20
    assert counts.speculation.num_accepted_tokens > 20


@pytest.mark.parametrize(("verifier", "is_ahead"), [("coupled", True), ("rejection", False)])
@pytest.mark.usefixtures("always")
def test_only_verifiers_whose_tokens_do_not_depend_on_drafts_run_ahead(
    tiny_model_dir, verifier, is_ahead
):
    speculation = SpeculativeConfig.of("suffix", 3, verifier=verifier)
    config = engine_config(speculation=speculation, async_scheduling=True)
    target = HashTarget(config.block_size, 512)
    engine = make_engine(tiny_model_dir, config, target)
    tokens_by(engine, [request("a", PROMPT, temperature=1.0)])
    assert (target.num_ahead > 5) == is_ahead


class SpiedChooser(GoodputChooser):
    """Keeps the outcomes that it learns from."""

    def __init__(self):
        super().__init__(CostModel(CostTable((1,), (0,), ((1.0,),))))
        self.outcomes = []

    def choose(self, now_s, num_decoding, shapes, prompts):
        return Decision(chain(3), DecisionReason.GOODPUT)

    def observe_drafts(self, num_asked, num_accepted, now_s, tree_size=0, *, num_drafts=1):
        self.outcomes += [(num_asked, num_accepted)] * num_drafts


@pytest.mark.usefixtures("always")
def test_the_policy_learns_what_rows_yield_that_were_not_guessed(tiny_model_dir):
    """Left out, they would make drafts look better than they are."""
    config = engine_config(speculation=SpeculativeConfig.of("suffix", 3), async_scheduling=True)
    chooser, target = SpiedChooser(), HashTarget(config.block_size, 512)
    control = SpeculationControl("auto", 64, 3)
    policy = SpeculationPolicy(control, frozen, choosers={None: chooser})
    engine = make_engine(tiny_model_dir, config, target, policy=policy, clock=frozen)
    tokens_by(engine, [request("a", PROMPT, max_tokens=100)])
    counts = engine.stats().counts
    num_accepted = sum(accepted for _, accepted in chooser.outcomes)
    assert target.num_ahead > 20
    assert {asked for asked, _ in chooser.outcomes[:-3]} == {3}, "the last ones have less room"
    assert num_accepted >= counts.speculation.num_accepted_tokens > 10
    assert len(chooser.outcomes) + num_accepted >= counts.num_generated_tokens - 4


def speculator_of(speculation, policy):
    lookup = make_proposer(SpeculativeConfig.of("suffix"))
    model = Stage("draft_model", ScriptedProposer({}), is_model=True)
    cascade = CascadeProposer([Stage("suffix", lookup), model])
    return Speculator(speculation, cascade, policy, begins_ahead=True)


@pytest.mark.parametrize("is_guessed", [True, False])
def test_rows_that_were_not_guessed_do_not_wait_for_a_draft_model(is_guessed):
    """Their steps have the times and the reason of the others, also while it catches up."""
    policy = SpeculationPolicy(SpeculationControl("auto", 64, 3), frozen, catches_up=True)
    speculator = speculator_of(SpeculativeConfig.of("draft_model", 3, first="suffix"), policy)
    decided = speculator.decide(2, 2)
    ahead = {seq_id: ProposalAhead(seq_id) for seq_id in (1, 2)}
    rows = [StepRow(seq_id, 8, (1,), 0, True) for seq_id in ahead]
    drafting = Drafting({}, ahead, dict.fromkeys(ahead, 3), is_guessed=is_guessed)
    speculator.begin_step(rows, drafting)
    reason = decided.reason if is_guessed else DecisionReason.CATCHING_UP
    assert policy.log.counts == {reason: 1}
    assert policy._is_timed == is_guessed


@pytest.mark.parametrize("batch_budget", [None, True])
@pytest.mark.parametrize(("is_guessed", "depth"), [(True, 0), (False, 0), (True, 3)])
def test_a_row_that_was_not_guessed_is_no_evidence_about_its_sequence(
    batch_budget, is_guessed, depth
):
    """It would have its share of slots depend on guesses."""
    speculation = SpeculativeConfig.of("suffix", 3, batch_budget=batch_budget)
    policy = SpeculationPolicy(SpeculationControl("auto", 64, 3), frozen)
    speculator, seq = speculator_of(speculation, policy), sequence(1, PROMPT)
    before = seq.acceptance
    drafting = Drafting({}, {1: ProposalAhead(1)}, {1: 3}, is_guessed=is_guessed)
    speculator.begin_step([StepRow(1, 8, (1,), 0, True)], drafting)
    speculator.observe(seq, depth, 0)
    assert (seq.acceptance == before) == (is_guessed and not depth)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("mode", "is_guessed"), [("off", True), ("outcomes", False)])
def test_nothing_is_guessed_where_the_draft_model_drafts_ahead(tiny_model_dir, mode, is_guessed):
    speculation = SpeculativeConfig.of("draft_model", 3, first="suffix", async_drafting=mode)
    config = engine_config(speculation=speculation, async_scheduling=True)
    target = HashTarget(config.block_size, 512)
    proposer = make_proposer(speculation, draft_model(tiny_model_dir))
    engine = make_engine(tiny_model_dir, config, target, proposer)
    tokens_by(engine, [request("a", PROMPT, max_tokens=100)])
    rows = [row for step in target.steps for row in step.rows]
    assert any(row.drafting.by_token for row in rows) == is_guessed


@pytest.mark.usefixtures("always")
def test_ranks_agree(tiny_model_dir):
    speculation = SpeculativeConfig.of("suffix", 3)
    plain = tokens_by(local_engine(tiny_model_dir, engine_config()), repetitive_requests())

    def generated(group):
        config = engine_config(speculation=speculation, async_scheduling=True)
        engine, target = engine_on(tiny_model_dir, config, group)
        return tokens_by(engine, repetitive_requests()), target.num_ahead

    for tokens, num_ahead in run_ranks(2, generated):
        assert tokens == plain
        assert num_ahead > 5


class Hopeless(SuffixProposer):
    """Never finds a guess; counts the attempts."""

    num_attempts = 0

    def propose_ahead(self, requests):
        self.num_attempts += 1


def test_attempts_without_a_guess_become_rare(tiny_model_dir):
    speculation = SpeculativeConfig.of("suffix", 3)
    proposer = Hopeless(speculation.drafter)
    run_timed(tiny_model_dir, 0.4, proposer=proposer)
    assert 3 < proposer.num_attempts < 25


@dataclass
class TimedTarget:
    """A target whose steps take a second. overlaps: False where it shares cores with the engine."""

    inner: HashTarget
    clock: Clock
    overlaps: bool = True
    free_at_s: float = 0.0
    sent_at_s: list[float] = field(default_factory=list)

    def begin(self, step):
        self.sent_at_s.append(self.clock.now_s)
        self.inner.begin(step)

    def collect(self):
        sent_at_s = self.sent_at_s.pop(0) if self.overlaps else self.clock.now_s
        self.free_at_s = max(self.free_at_s, sent_at_s) + 1.0
        self.clock.now_s = max(self.clock.now_s, self.free_at_s)
        return self.inner.collect()


class SlowMetrics(Metrics):
    """Metrics that take time, as the engine does between two steps."""

    def __init__(self, clock, seconds):
        super().__init__()
        self._clock, self._seconds = clock, seconds

    def record_batch(self, num_sequences, num_tokens):
        self._clock.now_s += self._seconds
        super().record_batch(num_sequences, num_tokens)


def run_timed(directory, serial_s, *, overlaps=True, is_async=True, proposer=None):
    """Return the tokens, the seconds, and the steps that were begun ahead."""
    speculation = SpeculativeConfig.of("suffix", 3)
    config = engine_config(
        speculation=speculation, async_scheduling=is_async, max_model_len=1200, num_blocks=400
    )
    clock, inner = Clock(), HashTarget(config.block_size, 512)
    target, recorder = TimedTarget(inner, clock, overlaps), SlowMetrics(clock, serial_s)
    engine = make_engine(directory, config, target, proposer, recorder=recorder, clock=clock)
    tokens = tokens_by(engine, [request("a", PROMPT, max_tokens=1000)])
    return tokens, clock.now_s, inner.num_ahead


def test_steps_begin_ahead_where_the_target_would_wait(tiny_model_dir):
    tokens, waiting_s, _ = run_timed(tiny_model_dir, 0.4, is_async=False)
    found, seconds, num_ahead = run_timed(tiny_model_dir, 0.4)
    assert found == tokens
    assert num_ahead > 100
    assert seconds < 0.9 * waiting_s


@pytest.mark.parametrize(("serial_s", "overlaps"), [(0.0, True), (0.01, False)])
def test_no_time_is_lost_where_it_would_not_wait(tiny_model_dir, serial_s, overlaps):
    tokens, waiting_s, _ = run_timed(tiny_model_dir, serial_s, overlaps=overlaps, is_async=False)
    found, seconds, num_ahead = run_timed(tiny_model_dir, serial_s, overlaps=overlaps)
    assert found == tokens
    assert num_ahead < 20
    assert seconds < 1.02 * waiting_s
