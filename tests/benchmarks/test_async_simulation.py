"""Tests of the simulation of asynchronous drafting, and of the engine's loop on its clock."""

import json
from itertools import product

import pytest

from benchmarks import async_simulation
from benchmarks.async_simulation import (
    MODES,
    TARGET_S,
    Case,
    CaseResult,
    ModeResult,
    Settings,
    Simulation,
    bars,
    charts,
    measure,
)
from benchmarks.simulated_models import (
    SimulatedClock,
    SimulatedDraftWorker,
    SimulatedTarget,
    Speeds,
    Texts,
)
from specdec.config.engine import DraftLimits
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.metrics.metrics import Metrics
from specdec.speculation.proposers import DraftModelProposer
from specdec.speculation.proposers.outcome_planner import RowPlan
from specdec.types.draft_messages import AheadRow, DraftRow, DraftStep
from tests.specdec.engines import engine_config, make_engine, request

LIMITS = DraftLimits(num_blocks=2000, block_size=16, max_model_len=2000, max_catch_up_tokens=64)


class Simulated:
    """The engine without a policy, so that what is drafted ahead is fixed."""

    def __init__(self, directory, mode, num_streams, ratio=0.1, acceptance=0.8, max_tokens=None):
        self.clock = SimulatedClock()
        self.texts = Texts(acceptance, 1.5)
        speeds = Speeds(TARGET_S, ratio * TARGET_S)
        self.target = SimulatedTarget(self.clock, speeds, self.texts)
        self.worker = SimulatedDraftWorker(self.clock, speeds, self.texts)
        self.proposer = DraftModelProposer(self.worker, LIMITS, clock=self.clock)
        config = engine_config(
            max_model_len=2000,
            num_blocks=8 * 125,
            block_size=16,
            max_num_batched_tokens=512,
            speculation=SpeculativeConfig.of("draft_model", 4, async_drafting=mode),
        )
        self.engine = make_engine(directory, config, self.target, self.proposer, clock=self.clock)
        for index in range(num_streams):
            asked = request(f"r{index}", [5, 6, 7], seed=index, max_tokens=max_tokens)
            self.engine.add(asked)

    def run(self, num_steps):
        """Return the tokens of each request."""
        tokens = {}
        for _ in range(num_steps):
            for output in self.engine.step():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
            self.proposer.check_integrity()
        return tokens

    @property
    def ahead(self):
        return self.proposer.counts.ahead


@pytest.mark.parametrize("mode", ["off", "continuing", "outcomes"])
@pytest.mark.parametrize("num_streams", [1, 8])
def test_the_tokens_are_those_of_the_texts(tiny_model_dir, mode, num_streams):
    simulated = Simulated(tiny_model_dir, mode, num_streams)
    for name, tokens in simulated.run(60).items():
        seq_id = int(name.removeprefix("r"))
        assert tokens == [simulated.texts.token(seq_id, 3 + index) for index in range(len(tokens))]


@pytest.mark.parametrize("mode", ["continuing", "outcomes"])
@pytest.mark.parametrize(("ratio", "acceptance"), [(0.1, 0.6), (0.6, 0.8), (3.0, 0.8)])
def test_no_step_of_a_batch_waits_for_a_draft(tiny_model_dir, mode, ratio, acceptance):
    """The time is that of the target's passes alone, however slow the draft model is."""
    simulated = Simulated(tiny_model_dir, mode, 8, ratio, acceptance)
    simulated.run(80)
    assert simulated.worker.num_waits == 0
    assert simulated.clock() == pytest.approx(79 * TARGET_S), "one step is still in flight"
    assert simulated.ahead.misses


def test_a_sequence_alone_waits_for_a_draft_after_a_miss(tiny_model_dir):
    simulated = Simulated(tiny_model_dir, "outcomes", 1, acceptance=0.5)
    simulated.run(80)
    num_misses = sum(simulated.ahead.misses.values())
    assert num_misses > 5
    assert simulated.worker.num_waits == pytest.approx(num_misses, abs=2)


@pytest.mark.parametrize("acceptance", [0.6, pytest.param(0.8, marks=pytest.mark.slow), 0.95])
def test_the_hit_rate_is_that_of_the_enumerated_outcomes(tiny_model_dir, acceptance):
    """The draft model's ranks are known: so is how often each outcome occurs."""
    simulated = Simulated(tiny_model_dir, "outcomes", 8, ratio=0.05, acceptance=acceptance)
    plan = (2, 2, 1, 1, 3)
    simulated.proposer._ahead.planner.plan = lambda rows, _, may_wait: [
        RowPlan(plan[4 - row.num_drafts :], row.num_next_tokens) for row in rows
    ]
    simulated.run(500)
    ranks = simulated.texts.rank_probabilities
    rejected = ranks[1:] / ranks[1:].sum()
    after_draft = sum(
        acceptance**count * (1 - acceptance) * rejected[: plan[count]].sum() for count in range(4)
    )
    after_draft += acceptance**4 * ranks[:3].sum()
    after_none = ranks[:3].sum()
    expected = after_none / (1 - after_draft + after_none)
    assert simulated.ahead.hit_rate == pytest.approx(expected, abs=0.03)


class Steps(Metrics):
    """Keeps the steps of the target, and what was drafted during each."""

    def __init__(self, clock):
        super().__init__()
        self.clock, self.verified, self.overlaps = clock, (0.0, 0.0), []

    def record_verify(self, seconds):
        self.verified = self.clock() - seconds, self.clock()

    def record_ahead(self, began_at_s, seconds):
        self.overlaps.append((self.verified, (began_at_s, began_at_s + seconds)))


def test_the_recorder_sees_that_drafting_and_verification_overlap(tiny_model_dir):
    simulated = Simulated(tiny_model_dir, "outcomes", 4, ratio=0.1)
    steps = Steps(simulated.clock)
    for recording in (simulated.engine._steps, simulated.engine._drafts):
        recording._recorder = steps
    simulated.run(60)
    assert len(steps.overlaps) > 20
    for (began_s, ended_s), (first_s, last_s) in steps.overlaps:
        assert began_s <= first_s < last_s <= ended_s + 1e-9


def test_a_drafting_device_that_is_off_is_idle(tiny_model_dir):
    simulated = Simulated(tiny_model_dir, "outcomes", 4)
    simulated.engine._speculator._config = None  # as a decision without drafts
    simulated.run(40)
    assert simulated.worker.busy_s == 0


def draft_step(step_id, *, drafts=(), ahead=()):
    return DraftStep(step_id, (), (), (), (), drafts, ahead)


def test_a_step_ends_an_enumeration_after_the_pass_that_runs():
    clock = SimulatedClock()
    worker = SimulatedDraftWorker(clock, Speeds(1.0, 0.1), Texts(0.8, 1.5))
    row = AheadRow(0, 9, (5, 6), 1, (1, 1), 5, 10)
    worker.begin(draft_step(1, ahead=(row,)))
    clock.now_s = 0.25  # within the third of six passes
    worker.begin(draft_step(2, drafts=(DraftRow(0, 10, (6,), 2, 11),)))
    worker.collect()
    assert clock() == pytest.approx(0.3 + 0.2)
    [output] = worker.collect_ahead(wait=False)
    assert [len(each.draft_token_ids) for each in output.rows[0].continuations] == [2, 2]
    assert worker.busy_s == pytest.approx(0.5)


@pytest.mark.slow
def test_a_case_meets_its_limits(tiny_model_dir):
    result = measure(tiny_model_dir, Case(0.2, 0.8, 1), Settings(300, 500))
    assert set(result.modes) == set(MODES)
    assert all(each.is_met for each in bars([result]))


def case_result(ratio, acceptance, streams):
    speeds = {0.1: (1, 2, 3, 4, 4), 0.2: (1, 2, 2, 3, 3)}[ratio]
    modes = {mode: ModeResult(speed) for mode, speed in zip(MODES, speeds, strict=True)}
    return CaseResult(Case(ratio, acceptance, streams), modes)


def test_a_line_for_each_acceptance_shows_the_speed_over_synchronous(monkeypatch):
    drawn = []
    monkeypatch.setattr(async_simulation, "draw_charts", drawn.extend)
    charts([case_result(*each) for each in product((0.2, 0.1), (0.5, 0.8), (16, 1))])
    assert [each.title.partition(":")[0] for each in drawn] == ["1 stream", "16 streams"]
    for each in drawn:
        assert each.x == [0.1, 0.2]
        assert each.series == {
            "continuing, acceptance 0.5": [1.5, 1.0],
            "outcomes, acceptance 0.5": [2.0, 1.5],
            "continuing, acceptance 0.8": [1.5, 1.0],
            "outcomes, acceptance 0.8": [2.0, 1.5],
        }


def test_the_report_is_written_even_if_nothing_can_draw_the_chart(tmp_path, monkeypatch):
    def draw_charts(charts):
        raise ModuleNotFoundError

    monkeypatch.setattr(async_simulation, "draw_charts", draw_charts)
    monkeypatch.setattr(async_simulation, "measure", lambda *_: case_result(0.1, 0.8, 1))
    path = tmp_path / "report.json"
    with pytest.raises(ModuleNotFoundError):
        async_simulation.main(["--ratio", "0.1", "--streams", "1", "--output", str(path)])
    assert json.loads(path.read_text())["results"][0]["case"]["ratio"] == 0.1


def test_auto_recovers_from_a_first_second_of_unlucky_drafts(tiny_model_dir, monkeypatch):
    """31 % of the first drafts ahead are accepted, of all 50 %: outcomes are the best nevertheless.

    Their tries in the first second are few, and with one stream the modes are 6 % apart.
    """
    monkeypatch.setattr(async_simulation, "MIN_ROWS", 1000)
    case, settings = Case(0.02, 0.5, 1), Settings(num_settling=300, num_measured=1000)
    speeds = {
        mode: Simulation(tiny_model_dir, case, mode, settings).run(settings).tokens_per_s
        for mode in ("outcomes", "auto")
    }
    assert speeds["auto"] >= 0.97 * speeds["outcomes"]


def test_none_is_the_speed_of_the_target(tiny_model_dir):
    settings = Settings(10, 20)
    found = Simulation(tiny_model_dir, Case(0.2, 0.8, 4), "none", settings).run(settings)
    assert found.tokens_per_s == pytest.approx(4 / TARGET_S)
