# Modules: specdec.types.validation
"""Tests of the limits of each parameter, just inside and just outside, and of defaults."""

import math
from dataclasses import replace

import numpy as np
import pytest

from specdec.types.errors import InvalidValueError
from specdec.types.sampling.sampling_params import (
    SamplingDefaults,
    SamplingParams,
    SpeculationOptions,
    StructuredOutput,
    _of_numbers,
    shared_params,
)

INSIDE = [
    {"n": 1},
    {"n": 128},
    {"temperature": 0},
    {"temperature": 100},
    {"top_p": 1e-9},
    {"top_p": 1},
    {"top_k": 0},
    {"top_k": 2**31 - 1},
    {"min_p": 0},
    {"min_p": 1},
    {"repetition_penalty": 1e-9},
    {"repetition_penalty": 100},
    {"presence_penalty": -2},
    {"presence_penalty": 2},
    {"frequency_penalty": -2},
    {"frequency_penalty": 2},
    {"logit_bias": {7: -100.0, 8: 100.0}},
    {"logit_bias": dict.fromkeys(range(1024), 0.0)},
    {"bad_words": ("x" * 256,) * 64},
    {"bad_words": ("x" * 64,) * 256},
    {"allowed_token_ids": (0,)},
    {"stop": ("x" * 256,) * 16},
    {"stop_token_ids": (0,) * 256},
    {"min_tokens": 5, "max_tokens": 5},
    {"max_tokens": 1},
    {"seed": 0},
    {"seed": 2**63 - 1},
    {"logprobs": 0},
    {"logprobs": 20},
    {"prompt_logprobs": 20},
    {"logprob_token_ids": (0,) * 128},
    {"structured_output": StructuredOutput(choice=("a",))},
]
OUTSIDE = [
    ("n", {"n": 0}),
    ("n", {"n": 129}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": 100.1}),
    ("temperature", {"temperature": math.nan}),
    ("temperature", {"temperature": math.inf}),
    ("temperature", {"temperature": 10**400}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": 1.1}),
    ("top_p", {"top_p": math.nan}),
    ("top_k", {"top_k": -2}),
    ("top_k", {"top_k": 2**31}),
    ("min_p", {"min_p": -0.1}),
    ("min_p", {"min_p": 1.1}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("repetition_penalty", {"repetition_penalty": 100.1}),
    ("repetition_penalty", {"repetition_penalty": math.nan}),
    ("presence_penalty", {"presence_penalty": -2.1}),
    ("presence_penalty", {"presence_penalty": math.inf}),
    ("frequency_penalty", {"frequency_penalty": 2.1}),
    ("logit_bias[7]", {"logit_bias": {7: 100.1}}),
    ("logit_bias[7]", {"logit_bias": {7: math.nan}}),
    ("logit_bias length", {"logit_bias": dict.fromkeys(range(1025), 0.0)}),
    ("bad_words[1]", {"bad_words": ("x", "")}),
    ("bad_words[0]", {"bad_words": ("x" * 257,)}),
    ("bad_words", {"bad_words": ("x",) * 257}),
    ("bad_words length", {"bad_words": ("x" * 64,) * 255 + ("x" * 65,)}),
    ("allowed_token_ids length", {"allowed_token_ids": ()}),
    ("stop[0]", {"stop": ("",)}),
    ("stop[0]", {"stop": ("x" * 257,)}),
    ("stop", {"stop": ("x",) * 17}),
    ("stop_token_ids length", {"stop_token_ids": (0,) * 257}),
    ("min_tokens", {"min_tokens": -1}),
    ("min_tokens", {"min_tokens": 6, "max_tokens": 5}),
    ("max_tokens", {"max_tokens": 0}),
    ("seed", {"seed": -(2**63) - 1}),
    ("seed", {"seed": 2**63}),
    ("logprobs", {"logprobs": -1}),
    ("logprobs", {"logprobs": 21}),
    ("prompt_logprobs", {"prompt_logprobs": -1}),
    ("prompt_logprobs", {"prompt_logprobs": 21}),
    ("logprob_token_ids length", {"logprob_token_ids": (0,) * 129}),
]
OPTIONS_INSIDE = [
    {"num_speculative_tokens": 0},
    {"num_speculative_tokens": 32},
    {"typical_epsilon": 0, "typical_delta": 1},
    {"acceptance_threshold": 0},
    {"acceptance_threshold": 1},
    {"acceptance_threshold": "auto"},
]
OPTIONS_OUTSIDE = [
    ("num_speculative_tokens", -1),
    ("num_speculative_tokens", 33),
    ("verifier", "dice"),
    ("typical_epsilon", 1.1),
    ("draft_confidence_threshold", 1.1),
    ("draft_confidence_threshold", -0.1),
    ("typical_delta", math.nan),
    ("acceptance_threshold", -0.1),
    ("acceptance_threshold", 1.1),
    ("acceptance_threshold", "harsh"),
]
OF_ANOTHER_TYPE = [
    {"n": 2.5},
    {"n": True},
    {"temperature": "0.5"},
    {"top_p": False},
    {"top_k": 1.5},
    {"logit_bias": [(7, 1.0)]},
    {"logit_bias": {"7": 1.0}},
    {"logit_bias": {7: "1"}},
    {"bad_words": "foo"},
    {"allowed_token_ids": (5, 6.0)},
    {"allowed_token_ids": "56"},
    {"bad_words": "END"},
    {"stop": [1]},
    {"stop": 5},
    {"stop_token_ids": 5},
    {"include_stop_str_in_output": 1},
    {"max_tokens": "9"},
    {"seed": 1.0},
    {"structured_output": {"json_object": True}},
    {"speculation": {"enabled": False}},
]


def named(error, field):
    assert error.field == field
    assert str(error).startswith(f"{field} is ")
    assert "; it must be " in str(error)
    return True


@pytest.mark.parametrize("values", INSIDE, ids=lambda values: next(iter(values)))
def test_the_limits_themselves_are_allowed(values):
    params = SamplingParams(**values)
    assert all(getattr(params, name) == value for name, value in values.items())


@pytest.mark.parametrize(("field", "values"), OUTSIDE)
def test_an_error_beyond_a_limit_names_field_value_and_limit(field, values):
    with pytest.raises(InvalidValueError) as caught:
        SamplingParams(**values)
    assert named(caught.value, field)


def test_the_limit_of_min_tokens_without_max_tokens():
    with pytest.raises(InvalidValueError, match=r"it must be from 0 to 2147483647$"):
        SamplingParams(min_tokens=2**31)


@pytest.mark.parametrize("values", OF_ANOTHER_TYPE, ids=str)
def test_a_value_of_another_type_is_rejected(values):
    [(field, value)] = values.items()
    with pytest.raises(InvalidValueError, match="it must be of type ") as caught:
        SamplingParams(**values)
    assert named(caught.value, field)
    assert caught.value.value in (value, tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    "values", [{"json_schema": {"type": "object"}}, {"choice": "abc"}, {"json_object": "yes"}]
)
def test_a_structure_of_another_type_is_rejected(values):
    with pytest.raises(InvalidValueError, match="it must be of type ") as caught:
        StructuredOutput(**values)
    assert named(caught.value, f"structured_output.{next(iter(values))}")


@pytest.mark.parametrize(
    ("field", "value"), [("enabled", 1), ("acceptance_threshold", [0.5]), ("verifier", 3)]
)
def test_an_option_of_another_type_is_rejected(field, value):
    with pytest.raises(InvalidValueError, match="it must be of type ") as caught:
        SpeculationOptions(**{field: value})
    assert named(caught.value, f"speculation.{field}")


def test_a_type_error_names_the_expected_type():
    with pytest.raises(
        InvalidValueError, match=r"^bad_words is 'END'; .* of type tuple\[str, \.\.\.\]$"
    ):
        SamplingParams(bad_words="END")
    with pytest.raises(InvalidValueError, match=r"^top_k is 1\.5; .* of type int or None$"):
        SamplingParams(top_k=1.5)


def test_lists_become_tuples():
    structure = StructuredOutput(choice=["a", "b"])
    assert hash(structure) == hash(StructuredOutput(choice=("a", "b")))
    params = SamplingParams(stop=["END"], bad_words=[], allowed_token_ids=[5, 6])
    assert params == SamplingParams(stop=("END",), allowed_token_ids=(5, 6))
    assert params == SamplingParams(stop="END", allowed_token_ids=(5, 6))


def test_every_parameter_with_a_limit_is_tested():
    flags = {"include_stop_str_in_output", "ignore_eos", "skip_special_tokens"}
    nested = {"speculation", "structured_output"}
    names = set(vars(SamplingParams())) - flags - nested
    assert {field.partition("[")[0].split()[0] for field, _ in OUTSIDE} == names
    assert {name for values in INSIDE for name in values} >= names


@pytest.mark.parametrize("values", OPTIONS_INSIDE)
def test_the_limits_of_speculation_are_allowed(values):
    options = SpeculationOptions(**values)
    assert all(getattr(options, name) == value for name, value in values.items())


@pytest.mark.parametrize(("field", "value"), OPTIONS_OUTSIDE)
def test_an_error_beyond_a_speculation_limit_names_the_field(field, value):
    with pytest.raises(InvalidValueError) as caught:
        SpeculationOptions(**{field: value})
    assert named(caught.value, f"speculation.{field}")


def test_the_repr_leaves_out_the_predicted_text():
    options = SpeculationOptions(enabled=True, prediction="the text of a file")
    assert "file" not in repr(SamplingParams(speculation=options))


def test_unset_parameters_get_the_models_defaults():
    defaults = SamplingDefaults(0.6, 0.9, 20, 0.1, 1.1, 99)
    assert SamplingParams().resolved(defaults) == defaults
    neutral = SamplingParams(
        temperature=0, top_p=1, top_k=0, min_p=0, repetition_penalty=1, max_tokens=1
    )
    assert neutral.resolved(defaults) == SamplingDefaults(0, 1, 0, 0, 1, 1)


def test_another_seed_changes_nothing_else():
    params = SamplingParams(n=2, temperature=0.5, stop="end", seed=3)
    last = params.with_seed(2**63 - 1)
    assert last == replace(params, seed=2**63 - 1)
    assert params.seed == 3


def test_requests_with_the_same_numbers_share_their_parameters():
    given = {"temperature": 0.5, "max_tokens": 7, "ignore_eos": True}
    assert shared_params(**given) is shared_params(**given)
    assert shared_params(**given) == SamplingParams(**given)
    assert shared_params(**{**given, "max_tokens": 8}).max_tokens == 8
    with pytest.raises(InvalidValueError, match="max_tokens"):
        shared_params(max_tokens=0)


@pytest.mark.parametrize("first", [-0.0, 0.0, 0])
def test_the_sign_and_the_type_of_a_zero_do_not_depend_on_earlier_requests(first):
    _of_numbers.cache_clear()
    shared_params(min_p=first)
    for each, text in [(-0.0, "0.0"), (0.0, "0.0"), (0, "0")]:
        assert repr(shared_params(min_p=each).min_p) == text


@pytest.mark.parametrize(("name", "valid", "other"), [("ignore_eos", True, 1), ("n", 1, True)])
def test_another_type_is_refused_although_equal_parameters_are_kept(name, valid, other):
    shared_params(**{name: valid})
    with pytest.raises(InvalidValueError, match=name):
        shared_params(**{name: other})


@pytest.mark.parametrize("more", [{"seed": 3}, {"stop": ["end"]}, {"logit_bias": {3: 1.0}}])
def test_other_parameters_are_not_kept(more):
    assert shared_params(**more) == SamplingParams(**more)
    assert shared_params(**more) is not shared_params(**more)


@pytest.mark.parametrize("name", ["stop_token_ids", "logit_bias", "seed"])
@pytest.mark.parametrize("value", [np.array([1, 2]), {1, 2}, set()])
def test_another_kind_of_collection_is_refused(name, value):
    with pytest.raises(InvalidValueError, match=f"{name} is "):
        SamplingParams(**{name: value})
