"""Random interleavings of all that can happen to an engine lose, double and change no token.

`make test-interleavings` runs 20,000 of them. A failure names the seed, of which a history is a
function.
"""

from dataclasses import dataclass

import pytest

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.requests.outputs import Delivery
from specdec.engine.scheduling import async_scheduling
from specdec.models.config.model_config import ModelConfig
from specdec.text.tokenizer import Tokenizer
from specdec.types.reports.stats import Counts
from tests.chaos.simulation import Simulation

NUM_QUICK_SEEDS, NUM_SEEDS, BLOCK = 120, 20_000, 500


class GuessingSimulation(Simulation):
    """Drafts by suffix decoding; steps begin ahead with guesses in 7 of 10 cases.

    num_guessed: rows whose outcome was guessed, and that have a draft. num_missed: others.
    """

    num_guessed = num_missed = 0

    def _make_speculation(self):
        return SpeculativeConfig.of("suffix", self.random.choice((1, 3, 5)), policy="threshold")

    def _make_engine(self, model, tokenizer):
        engine = super()._make_engine(model, tokenizer)
        gain = engine._speculator._gain
        if gain is not None:
            gain.pays = lambda num_rows: self.random.random() < 0.7
            gain.end_step = self._count
        return engine

    def _count(self, step, *, is_guessed, decodes_alone):
        if is_guessed:
            num_guessed = sum(row.num_draft_tokens > 0 for _, row in step.rows)
            self.num_guessed += num_guessed
            self.num_missed += len(step.rows) - num_guessed


@dataclass
class Models:
    model: ModelConfig
    tokenizer: Tokenizer

    def faults(self, seeds, kind=Simulation, **more):
        """Return the violations of each seed that has some."""
        found = {seed: kind(seed, self.model, self.tokenizer, **more).run() for seed in seeds}
        return {seed: faults for seed, faults in found.items() if faults}


@pytest.fixture(scope="module")
def models(tiny_model_dir):
    return Models(ModelConfig.from_directory(tiny_model_dir), Tokenizer(tiny_model_dir))


def run_until_failure(models, kind):
    """Return whether a history has a violation, or engine or target fail."""
    try:
        return bool(models.faults(range(8), kind))
    except (AssertionError, IndexError):
        return True


def test_some_interleavings_violate_nothing(models):
    """They lose targets, preempt, draft, and admit sequences to steps begun ahead."""
    simulations = [
        Simulation(seed, models.model, models.tokenizer) for seed in range(NUM_QUICK_SEEDS)
    ]
    faults = {seed: each.run() for seed, each in enumerate(simulations)}
    assert {seed: found for seed, found in faults.items() if found} == {}
    counts = Counts.sum(each.engine.stats().counts for each in simulations)
    assert sum(each.num_losses for each in simulations) > 40
    assert counts.num_preemptions > 40
    assert counts.speculation.num_accepted_tokens > 160
    assert sum(each.target.num_held for each in simulations) > 160
    assert sum(each.num_admitted_ahead for each in simulations) > 50
    assert sum(each.target.num_repeated for each in simulations) > 50
    assert sum(each.num_tokens_alone for each in simulations) > 100


def test_guessed_outcomes_violate_nothing(models):
    simulations = [
        GuessingSimulation(seed, models.model, models.tokenizer)
        for seed in range(NUM_QUICK_SEEDS // 2)
    ]
    faults = {seed: each.run() for seed, each in enumerate(simulations)}
    assert {seed: found for seed, found in faults.items() if found} == {}
    assert sum(each.num_guessed for each in simulations) > 70
    assert sum(each.num_missed for each in simulations) > 70
    assert sum(each.num_admitted_ahead for each in simulations) > 25


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Simulation, GuessingSimulation])
@pytest.mark.parametrize("first", range(0, NUM_SEEDS, BLOCK))
def test_many_interleavings_violate_nothing(models, first, kind):
    assert models.faults(range(first, first + BLOCK), kind) == {}


def test_a_step_that_is_resolved_as_guessed_is_found(models, monkeypatch):
    """The engine takes every guess for right, where ranks compare it with the outcome."""

    def as_guessed(seq, row):
        by_token = row.drafting.by_token
        if not row.is_pending or not by_token:
            return seq, row
        return seq, row.resolved(row.num_computed_tokens, by_token[0][0])

    monkeypatch.setattr(async_scheduling, "_resolved", as_guessed)
    assert run_until_failure(models, GuessingSimulation)


def test_a_lost_token_is_found(models):
    """The fault is put between the engine and its clients."""

    def lose(outputs):
        return [each._replace(token_ids=each.token_ids[:-1]) for each in outputs]

    assert set(models.faults(range(8), deliver=lose)) == set(range(8))


def test_a_doubled_token_is_found(models):
    def double(outputs):
        return [each._replace(token_ids=each.token_ids + each.token_ids[-1:]) for each in outputs]

    assert set(models.faults(range(8), deliver=double)) == set(range(8))


def test_a_lost_end_is_found(models):
    def lose_ends(outputs):
        return [each for each in outputs if not each.is_last]

    assert set(models.faults(range(8), deliver=lose_ends)) == set(range(8))


def test_outputs_that_are_lost_with_the_target_are_found(models, monkeypatch):
    monkeypatch.setattr(Simulation, "committed", lambda simulation, error: Delivery())
    assert len(models.faults(range(30))) > 3
