# Modules: specdec.config.speculation.method_roles, specdec.config.speculation.speculative
# Modules: specdec.config.speculation.speculative_checks
# Modules: specdec.config.speculation.synthetic_acceptance
"""How speculative_config is read: vLLM's keys and meanings, older spellings, what is wrong."""

import json
import logging

import pytest

from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.config.speculative_keys import read_speculation
from specdec.types.drafts.draft_decision import DraftAhead
from specdec.types.errors import InvalidValueError


def test_every_key_of_suffix_decoding_with_its_default():
    read = read_speculation({"method": "suffix"})
    assert read == SpeculativeConfig.of("suffix")
    given = {name: value for name, value in read.to_mapping().items() if name.startswith("suffix_")}
    assert given == {
        "suffix_decoding_max_tree_depth": 24,
        "suffix_decoding_max_cached_requests": 10_000,
        "suffix_decoding_max_spec_factor": 1.0,
        "suffix_decoding_min_token_prob": 0.1,
    }


@pytest.mark.parametrize(
    ("mapping", "methods"),
    [
        ({"method": "suffix"}, ("suffix",)),
        ({"method": "lookahead"}, ("lookahead",)),
        ({"method": "draft_model"}, ("draft_model",)),
        ({"method": "draft_model", "first": "ngram"}, ("ngram", "draft_model")),
        ({"method": "draft_model", "fallback": "suffix"}, ("draft_model", "suffix")),
        (
            {"model": "./small", "first": "suffix", "fallback": "ngram"},
            ("suffix", "draft_model", "ngram"),
        ),
        ({"method": "suffix", "fallback": "ngram"}, ("suffix", "ngram")),
        ({"method": "ngram", "fallback": "draft_model"}, ("ngram", "draft_model")),
        ({"fallback": "draft_model", "model": "./small"}, ("ngram", "draft_model")),
        ({"method": "lookahead", "first": "ngram"}, ("ngram", "lookahead")),
        (
            {
                "method": "eagle",
                "model": "./head",
                "first": "ngram",
                "fallback": {"method": "draft_model", "model": "./small"},
            },
            ("ngram", "eagle", "draft_model"),
        ),
        (
            {"method": "suffix", "first": "draft_model", "fallback": "lookahead"},
            ("draft_model", "suffix", "lookahead"),
        ),
    ],
)
def test_what_drafts_in_which_order(mapping, methods):
    assert read_speculation(json.dumps(mapping)).methods == methods


@pytest.mark.parametrize(
    ("given", "low", "high"),
    [
        ({}, 2, 4),
        ({"prompt_lookup_max": 3}, 3, 3),
        ({"prompt_lookup_min": 5}, 5, 5),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 5}, 2, 5),
    ],
)
def test_one_length_of_ngrams_is_the_only_one(given, low, high):
    read = read_speculation({"method": "ngram", **given})
    assert (read.drafter.prompt_lookup_min, read.drafter.prompt_lookup_max) == (low, high)


@pytest.mark.parametrize(
    ("older", "today"),
    [
        ({"disable_by_batch_size": 8}, {"speculation_threshold": 8}),
        ({"speculative_disable_by_batch_size": 8}, {"speculation_threshold": 8}),
        ({"spec_method": "suffix"}, {"method": "suffix"}),
        ({"model": "[ngram]"}, {"method": "ngram"}),
        ({"speculative_model": "[ngram]"}, {"method": "ngram"}),
        ({"speculative_model": "./small"}, {"method": "draft_model", "model": "./small"}),
        (
            {"model": "./small", "speculative_draft_tensor_parallel_size": 2},
            {"model": "./small", "draft_tensor_parallel_size": 2},
        ),
        (
            {"ngram_prompt_lookup_max": 5, "ngram_prompt_lookup_min": 3},
            {"prompt_lookup_max": 5, "prompt_lookup_min": 3},
        ),
    ],
)
def test_older_spellings_are_read_with_a_warning(older, today, caplog):
    with caplog.at_level(logging.WARNING):
        assert read_speculation(older) == read_speculation(today)
    assert caplog.records
    assert all("is an older spelling of" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("of_vllm", "ours"),
    [
        ({"rejection_sample_method": "standard"}, {"verifier": "rejection"}),
        ({"rejection_sample_method": "block"}, {"verifier": "block"}),
        ({"parallel_drafting": False}, {}),
        (
            {"method": "eagle3", "model": "./a", "parallel_drafting": True},
            {"method": "p_eagle", "model": "./a"},
        ),
        ({"method": "pard"}, {"method": "draft_model", "parallel_drafting": True}),
        ({"disable_padded_drafter_batch": True}, {}),
        ({"method": "mlp"}, {"method": "mlp_speculator"}),
        ({"method": "qwen3_next_mtp"}, {"method": "mtp"}),
    ],
)
def test_keys_of_vllm_mean_what_they_mean_there(of_vllm, ours):
    assert read_speculation({"model": "./a", **of_vllm}) == read_speculation(
        {"model": "./a", **ours}
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("disable_padded_drafter_batch", False),
        ("use_heterogeneous_vocab", True),
        ("draft_sample_method", "probabilistic"),
        ("enforce_eager", True),
    ],
)
def test_keys_of_vllm_without_an_effect_are_accepted_with_a_note(key, value, caplog):
    with caplog.at_level(logging.WARNING):
        assert read_speculation({"model": "./a", key: value}) == read_speculation({"model": "./a"})
    [record] = caplog.records
    assert f"speculative_config.{key} has no effect" in record.getMessage()


def test_todays_spellings_are_read_without_one(caplog):
    with caplog.at_level(logging.WARNING):
        read_speculation({"model": "./small", "speculation_threshold": 8})
        read_speculation(SpeculativeConfig.of("draft_model", first="ngram").to_mapping())
    assert not caplog.records


HEAD = {"method": "medusa", "model": "./head"}


def test_roles_with_their_own_keys():
    fallback = {"method": "draft_model", "model": "./small", "quantization": "int8"}
    first = {"method": "suffix", "suffix_decoding_max_tree_depth": 9}
    read = read_speculation(json.dumps({**HEAD, "first": first, "fallback": fallback}))
    assert (read.head.model, read.head.quantization) == ("./head", None)
    assert (read.draft_model.model, read.draft_model.quantization) == ("./small", "int8")
    assert read.first.suffix_decoding_max_tree_depth == 9
    mapping = read.to_mapping()
    assert (mapping["first"], mapping["fallback"]["model"]) == ("suffix", "./small")
    assert SpeculativeConfig.of(**mapping) == read_speculation(mapping) == read


@pytest.mark.parametrize(
    ("value", "choices"),
    [
        ("off", ("off",)),
        ("continuing", ("off", "continuing")),
        ("outcomes", ("off", "outcomes")),
        ("auto", ("off", "continuing", "outcomes")),
    ],
)
@pytest.mark.parametrize("role", ["method", "fallback"])
def test_what_may_be_drafted_ahead(value, choices, role):
    others = {} if role == "method" else {"method": "ngram"}
    read = read_speculation({role: "draft_model", "async_drafting": value, **others})
    assert read.ahead_choices == tuple(map(DraftAhead, choices))
    assert read.draft_ahead == choices[-1]
    assert read.without_drafts_ahead.ahead_choices == (DraftAhead.OFF,)


def test_a_role_has_the_names_of_vllm_too():
    fallback = {"method": "pard", "model": "./pard"}
    read = read_speculation({**HEAD, "fallback": fallback})
    assert read.draft_model.parallel_drafting
    keys = {"method": "ngram", "fallback": {"method": "suffix"}, "prompt_lookup_max": 3}
    assert read_speculation(keys).drafter.prompt_lookup_min == 3


DRAFT = {"method": "draft_model"}
SYNTHETIC = {"rejection_sample_method": "synthetic"}


@pytest.mark.parametrize(
    ("given", "rates"),
    [
        ({"synthetic_acceptance_rates": [0.8, 0.4, 0.0, 0.0]}, (0.8, 0.5, 0.0, 0.0)),
        ({"synthetic_acceptance_length": 3.25}, (1.0, 1.0, 0.25, 0.0)),
        ({"synthetic_acceptance_length": 1}, (0.0,) * 4),
        ({"synthetic_acceptance_length": 5}, (1.0,) * 4),
        ({"synthetic_acceptance_rate": 0.8}, (0.8,) * 32),
    ],
)
def test_synthetic_acceptance_is_read_as_rates_by_place(given, rates):
    read = read_speculation({**SYNTHETIC, "num_speculative_tokens": 4, **given})
    assert read.verifier == "synthetic"
    assert read.synthetic_rates == pytest.approx(rates)
    assert "synthetic" in read.allowed_verifiers
    assert SpeculativeConfig.of(**read.to_mapping()) == read


def test_synthetic_acceptance_is_no_verifier_of_requests_by_default():
    assert "synthetic" not in read_speculation({}).control.allowed_verifiers


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"method": "orakel"}, "it must be one of ngram, draft_model, suffix, lookahead"),
        ({"method": "eagle"}, "model is None; it must be the directory or Hub id of the head"),
        ({"method": "mtp", "draft_window": 0}, "draft_window is 0; it must be from 1 to"),
        ({"method": "medusa", "model": "./a", "draft_window": 9}, "left out unless method, first"),
        ({"speculative_token_map": "./a.json"}, "fallback is draft_model or medusa or mlp_"),
        ({"method": "medusa", "model": "./a", "speculative_token_map": 3}, "must be a string"),
        ({"method": 3}, "method is 3; it must be a string"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0; it must be from 1 to 32"),
        ({"num_speculative_tokens": 2.5}, "num_speculative_tokens is 2.5; it must be a whole"),
        ({"num_spec_tokens": 3}, "did you mean num_speculative_tokens?"),
        ({"num_draft_tokens": 3}, "did you mean num_speculative_tokens?"),
        ({"speculative_num_draft_tokens": 3}, "did you mean num_speculative_tokens?"),
        ({"num_draft_tree_token": 3}, "did you mean num_draft_tree_tokens?"),
        ({"suffix_decoding_tree_depth": 3}, "did you mean suffix_decoding_max_tree_depth?"),
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 3}, "prompt_lookup_max is 3; it must be"),
        ({"prompt_lookup_max": 17}, "prompt_lookup_min is 17; it must be from 1 to 16"),
        ({"model": "./a", "method": "ngram"}, "model is './a'; it must be left out unless method"),
        ({"method": "medusa"}, "model is None; it must be the directory or Hub id of the head"),
        ({"method": "medusa", "model": "./a", "quantization": "int3"}, "quantization is 'int3'"),
        ({"first": "ngram"}, "first is 'ngram'; it must be another method than method, since"),
        ({**DRAFT, "fallback": "draft_model"}, "fallback is 'draft_model'; it must be another m"),
        ({"quantization": "int8"}, "left out unless method, first or fallback is d"),
        ({"draft_tensor_parallel_size": 2}, "left out unless method, first or fallback is d"),
        ({"max_model_len": 99}, "left out unless method, first or fallback is d"),
        (
            {"method": "medusa", "model": "./a", "fallback": "draft_model"},
            "fallback is 'draft_model'; it must be a method without the key model, which",
        ),
        ({**HEAD, "fallback": {"model": "./a"}}, "it must be an object with the key method"),
        ({**HEAD, "fallback": {"method": "oracle"}}, "fallback.method is 'oracle'; it must be one"),
        ({**HEAD, "fallback": {"method": 3}}, "fallback.method is 3; it must be a string"),
        ({**HEAD, "fallback": {**DRAFT, "prompt_lookup_max": 3}}, "fallback key"),
        ({**HEAD, "fallback": {**DRAFT, "num_speculative_tokens": 3}}, "fallback key"),
        (
            {**HEAD, "fallback": {**DRAFT, "max_model_len": 1}},
            "speculative_config.fallback.max_model_len is 1; it must be from 2",
        ),
        (
            {**HEAD, "fallback": {"method": "eagle", "model": "./a"}},
            "fallback is 'eagle'; it must be another method than a head, since the target's ranks",
        ),
        ({**HEAD, "first": HEAD}, "first is 'medusa'; it must be another method than method"),
        ({**HEAD, "fallback": DRAFT, "max_model_len": 9}, "left out unless method, first or fall"),
        ({"suffix_decoding_max_tree_depth": 9}, "left out unless method, first or fallback is suf"),
        ({"method": "suffix", "prompt_lookup_max": 3}, "unless method, first or fallback is ngram"),
        ({**DRAFT, "first": "ngram", "suffix_decoding_max_spec_factor": 2}, "fallback is suffix"),
        ({**DRAFT, "first": "oracle"}, "first is 'oracle'; it must be one of ngram, draft_model, "),
        ({**DRAFT, "first": "ngram", "fallback": "ngram"}, "another method than first, since each"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 1}, "from 2 to 256"),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": -1}, "from 0 to"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 0}, "from 0.01 to 32"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": float("nan")}, "from 0.01 to 32"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "from 0 to 1"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": "0.5"}, "it must be a number"),
        (
            {"method": "ngram", "lookahead_pool_size": 9},
            "unless method, first or fallback is lookahead",
        ),
        ({"method": "lookahead", "lookahead_window_size": 0}, "from 1 to 64"),
        ({"method": "lookahead", "lookahead_ngram_size": 1}, "from 2 to 16"),
        ({"method": "lookahead", "lookahead_ngram_size": 17}, "from 2 to 16"),
        ({"method": "lookahead", "lookahead_pool_size": 0}, "from 1 to 65536"),
        ({"method": "lookahead", "lookahead_window_size": 2.5}, "it must be a whole number"),
        ({"disable_by_batch_size": 2, "speculation_threshold": 3}, "speculation_threshold alone"),
        ({"parallel_drafting": True}, "left out unless method, first or fallback is draft_model"),
        ({**DRAFT, "parallel_drafting": 1}, "parallel_drafting is 1; it must be true or false"),
        ({"batch_budget": True, "adaptive_length": True}, "left out where adaptive_length is true"),
        ({"batch_budget_max": 9}, "batch_budget_max is 9; it must be left out unless batch_budget"),
        ({"batch_budget": True, "batch_budget_max": 2}, "batch_budget_max is 2; it must be from 3"),
        ({**DRAFT, "draft_window": 0}, "draft_window is 0; it must be from 1 to 16777216"),
        ({**DRAFT, "async_drafting": "on"}, "it must be one of off, continuing, outcomes, auto"),
        ({"async_drafting": "auto"}, "left out unless method, first or fallback is draft_model"),
        (
            {"method": "pard", "model": "./pard", "async_drafting": "outcomes"},
            "off with parallel_drafting, which makes a whole draft in one forward pass",
        ),
        ({"method": "pard", "parallel_drafting": False}, "true or left out where method is pard"),
        ({"disable_padded_drafter_batch": 1}, "it must be true or false, or left out: drafts"),
        ({"draft_sample_method": "beam"}, "it must be greedy or probabilistic, or left out"),
        ({"rejection_sample_method": "strict"}, "it must be one of standard, block, synthetic; "),
        ({"rejection_sample_method": ["block"]}, "it must be one of standard, block, synthetic; "),
        (SYNTHETIC, "accompanied by exactly one of synthetic_acceptance_rate, "),
        (
            {**SYNTHETIC, "synthetic_acceptance_length": 2, "synthetic_acceptance_rate": 0.5},
            "accompanied by exactly one of",
        ),
        ({**SYNTHETIC, "synthetic_acceptance_length": 5}, "length is 5; it must be from 1 to 4"),
        ({**SYNTHETIC, "synthetic_acceptance_rate": 1.5}, "rate is 1.5; it must be from 0 to 1"),
        (
            {**SYNTHETIC, "synthetic_acceptance_rates": [0.5]},
            "a list of num_speculative_tokens (3)",
        ),
        (
            {**SYNTHETIC, "synthetic_acceptance_rates": [0.5, 0.6, 0.1]},
            "no number exceeds the one before it",
        ),
        (
            {**SYNTHETIC, "synthetic_acceptance_rates": [0.5, 0.4, -0.1]},
            "synthetic_acceptance_rates[2] is -0.1; it must be from 0 to 1",
        ),
        ({"synthetic_acceptance_length": 2}, "left out unless synthetic is one of allowed_verif"),
        ({"rejection_sample_method": "block", "verifier": "block"}, "left out where verifier is"),
        ({"rejection_sample_method": "block", "allowed_verifiers": ["coupled"]}, "verifier is 'bl"),
        ({"num_speculative_tokens_per_batch_size": [[2, 3, 3]]}, "a row that begins with 1"),
        ({"num_speculative_tokens_per_batch_size": [[1, 3, 4]]}, "at most num_speculative_tokens"),
        ({"num_speculative_tokens_per_batch_size": [3]}, "size[0] is 3; it must be a list"),
        ({"policy": "table"}, "given if policy is table, and left out otherwise"),
        (
            {"policy": "goodput", "num_speculative_tokens_per_batch_size": [[1, 2, 3]]},
            "given if policy is table, and left out otherwise",
        ),
        ({"policy": "luck"}, "one of threshold, table, goodput, or left out"),
    ],
)
def test_wrong_configurations_get_one_clear_line(mapping, message):
    with pytest.raises(InvalidValueError) as caught:
        read_speculation(mapping)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("mapping", "policy", "threshold"),
    [
        ({}, "goodput", 256),
        ({"policy": "threshold"}, "threshold", 32),
        ({"num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 9, 0]]}, "table", 32),
        ({"speculation_threshold": 7}, "goodput", 7),
    ],
)
def test_what_decides_below_which_threshold(mapping, policy, threshold):
    read = read_speculation(mapping)
    assert (read.chosen_policy, read.control.threshold) == (policy, threshold)


@pytest.mark.parametrize("method", ["ngram", "draft_model", "medusa"])
@pytest.mark.parametrize(
    ("keys", "divides"),
    [({}, True), ({"batch_budget": False}, False), ({"adaptive_length": True}, False)],
)
def test_slots_are_left_out_unless_lengths_are_decided_otherwise(method, keys, divides):
    keys = keys if method == "ngram" else {**keys, "model": "./drafter"}
    assert SpeculativeConfig.of(method, **keys).divides_slots is divides
