"""Contenders of this project on the tiny model."""

from dataclasses import asdict

import pytest

from benchmarks.contenders import EngineContender, EngineSettings
from benchmarks.methods import METHODS, make_method
from benchmarks.workloads import NO_METHOD, Workload

OF_ANY_MODEL = tuple(each for each in METHODS if each != "eagle3")
"""Without the head of the demo model."""
PROMPTS = ((5, 6, 7, 5, 6, 7, 5, 6), (9, 8, 7), (1, 2, 3, 1, 2))


@pytest.fixture(scope="module")
def contender(tiny_model_dir):
    return EngineContender(tiny_model_dir, EngineSettings(methods=OF_ANY_MODEL, num_blocks=16))


@pytest.mark.parametrize("method", OF_ANY_MODEL)
def test_all_methods_generate_equal_tokens(contender, method):
    plain = contender.measure(Workload(PROMPTS, 12))
    drafted = contender.measure(Workload(PROMPTS, 12, method))
    assert [each.token_ids for each in drafted.streams] == [
        each.token_ids for each in plain.streams
    ]
    assert drafted.num_tokens == 12 * len(PROMPTS)


def test_the_number_of_open_streams_is_limited(contender):
    one_at_a_time = contender.measure(Workload(PROMPTS, 6, num_streams=1))
    together = contender.measure(Workload(PROMPTS, 6))
    assert [each.token_ids for each in one_at_a_time.streams] == [
        each.token_ids for each in together.streams
    ]
    # A single stream has a step for each token, so its time is its share of the total time.
    assert sum(each.arrivals_s[-1] for each in one_at_a_time.streams) <= one_at_a_time.seconds


def test_drafts_yield_several_tokens_per_message(contender):
    draft_model = contender.measure(Workload(PROMPTS[:1], 12, "draft_model"))
    assert len(draft_model.streams[0].arrivals_s) < 12
    assert draft_model.mean_acceptance_length > 1


def test_the_parts_of_a_profile_add_up_to_the_step(contender, monkeypatch):
    measure, seconds = contender.measure, []

    def noted(workload):
        measured = measure(workload)
        seconds.append(measured.seconds)
        return measured

    monkeypatch.setattr(contender, "measure", noted)
    profile = asdict(contender.profile(Workload(PROMPTS, 6)))
    num_steps = profile.pop("num_steps")
    assert (profile.pop("num_streams"), num_steps) == (3, 6)
    assert min(profile.values()) > 0
    assert sum(profile.values()) * num_steps == pytest.approx(1000 * seconds[0])


def test_only_automatic_control_has_a_policy(contender):
    assert [name for name in METHODS if make_method(name).is_automatic] == ["auto"]
    policies = {name: engine._speculator.policy for name, engine in contender._engines.items()}
    assert [name for name, policy in policies.items() if policy is not None] == ["auto"]


def test_methods_use_the_given_number_of_draft_tokens():
    assert make_method(NO_METHOD).config is None
    assert make_method("ngram", 4).config.num_speculative_tokens == 4


def test_suffix_decoding_keeps_no_earlier_answers(contender):
    first = contender.measure(Workload(PROMPTS[:1], 12, "suffix"))
    again = contender.measure(Workload(PROMPTS[:1], 12, "suffix"))
    assert len(again.streams[0].arrivals_s) == len(first.streams[0].arrivals_s)
