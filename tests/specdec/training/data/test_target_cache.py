"""The hidden states of samples that are read again are not computed again, and are the same."""

import pytest

from specdec.training.data.batches import Batch
from specdec.training.data.corpus import Sample
from specdec.training.data.target import Target, TargetPrecision
from specdec.training.data.target_cache import CachedTarget

SAMPLES = [Sample((8, 6, 4, 2, last), 2, 0.0) for last in (1, 2)] + [
    Sample((first, 6, 4, 2, 7, 7), 1, 0.8) for first in (3, 4)
]
NUM_TOKENS = 4 + 5 + 5
"""That the target reads; the first two samples differ in the last token only, which it does not."""


@pytest.fixture
def passes(monkeypatch):
    """Return the lengths of the samples that the target computes."""
    computed, compute = [], Target.hidden_states

    def noted(self, batch, taps):
        computed.append(batch.num_tokens)
        return compute(self, batch, taps)

    monkeypatch.setattr(Target, "hidden_states", noted)
    return computed


def cached(target, max_tokens):
    """Return one with memory for some tokens of one tap."""
    max_bytes = max_tokens * 4 * target.config.hidden_size * 2
    return CachedTarget(target.directory, 128, TargetPrecision(kernels="torch"), max_bytes)


def test_states_are_those_of_the_target(target):
    whole, taps = Batch.of(SAMPLES), (0, 2)
    kept = cached(target, 2 * NUM_TOKENS)
    for _ in range(2):
        for own, expected in zip(
            kept.hidden_states(whole, taps), target.hidden_states(whole, taps), strict=True
        ):
            assert own.shape == expected.shape
            assert own.sub(expected).abs().max() < 1e-5
    assert len(kept.hidden_states(whole, (1,)).tapped[0]) == 1, "other taps are computed"


def test_a_sample_is_computed_once(target, passes):
    kept = cached(target, NUM_TOKENS)
    for order in (SAMPLES, SAMPLES[::-1]):
        kept.hidden_states(Batch.of(order), (1,))
    assert passes == [4, 5, 5]


@pytest.mark.parametrize("num_missing", [1, 5])
def test_above_the_limit_the_samples_that_came_first_stay(target, passes, num_missing):
    kept = cached(target, NUM_TOKENS - num_missing)
    for order in (SAMPLES, SAMPLES[::-1], SAMPLES):
        kept.hidden_states(Batch.of(order), (1,))
    assert passes == [4, 5, 5, 5, 5]


def test_more_taps_take_more_memory(target, passes):
    kept = cached(target, NUM_TOKENS)
    for _ in range(2):
        kept.hidden_states(Batch.of(SAMPLES), (0, 1, 2))
    assert passes == [4, 5, 5, 5, 5], "the first sample fits, and no other"


def test_samples_of_earlier_versions_leave_room_for_others(target, passes):
    kept = cached(target, 5)
    kept.hidden_states(Batch.of(SAMPLES[2:3]), (1,))
    kept.keep_only(SAMPLES[3:])
    for _ in range(2):
        kept.hidden_states(Batch.of(SAMPLES[3:]), (1,))
    kept.keep_only(SAMPLES[3:])
    kept.hidden_states(Batch.of(SAMPLES[3:]), (1,))
    assert passes == [5, 5]
