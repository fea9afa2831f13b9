"""Random interleavings of all that can happen to an engine lose, double and change no token.

`make test-interleavings` runs 20,000 of them. A failure names the seed, of which a history is a
function.
"""

from dataclasses import dataclass

import pytest

from specdec.engine.requests.outputs import Delivery
from specdec.models.config.model_config import ModelConfig
from specdec.text.tokenizer import Tokenizer
from specdec.types.reports.stats import Counts
from tests.chaos.simulation import Simulation

NUM_QUICK_SEEDS, NUM_SEEDS, BLOCK = 120, 20_000, 500


@dataclass
class Models:
    model: ModelConfig
    tokenizer: Tokenizer

    def faults(self, seeds, **more):
        """Return the violations of each seed that has some."""
        found = {seed: Simulation(seed, self.model, self.tokenizer, **more).run() for seed in seeds}
        return {seed: faults for seed, faults in found.items() if faults}


@pytest.fixture(scope="module")
def models(tiny_model_dir):
    return Models(ModelConfig.from_directory(tiny_model_dir), Tokenizer(tiny_model_dir))


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


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, NUM_SEEDS, BLOCK))
def test_many_interleavings_violate_nothing(models, first):
    assert models.faults(range(first, first + BLOCK)) == {}


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
