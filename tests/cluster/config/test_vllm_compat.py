# Modules: specdec.config.vllm_compat
"""How settings in vLLM's words are read, whatever they come from."""

import pytest

from cluster.config.config_file import read_models
from cluster.config.serve_config import ServeConfig
from cluster.config.vllm_compat import ALWAYS, RENAMED, SAME, in_our_words
from specdec.config.model_aliases import ALIASES
from specdec.config.speculative_keys import SPECULATION_KEYS
from specdec.types.errors import InvalidValueError

FIRST = ALIASES["smollm2-135m-instruct"].drafters[0].keys("cpu")


def speculation(*sources, model="tiny"):
    return in_our_words(*sources, model=model)["speculative_config"]


def test_our_own_words_stay_as_they_are():
    source = {"model": "tiny", "grpc_port": 9001, "speculative_config": {"method": "suffix"}}
    assert in_our_words(source) == source


def test_a_file_may_use_dashes_and_vllms_names():
    assert in_our_words({"port": 8001, "max-model-len": 99, "dtype": "float"}) == {
        "http_port": 8001,
        "max_model_len": 99,
        "dtype": "float32",
    }


def test_a_table_names_each_thing_once():
    tables = [RENAMED, SPECULATION_KEYS, ALWAYS]
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names))
    assert not set(names) & set(ServeConfig().to_mapping())
    assert set(SAME) < set(ServeConfig().to_mapping())


def test_a_later_source_wins_key_by_key():
    file = {"speculative_config": {"method": "suffix", "num_speculative_tokens": 2}}
    assert speculation(file, {"num_speculative_tokens": 7}) == {
        "method": "suffix",
        "num_speculative_tokens": 7,
    }
    whole = {"speculative_config": '{"method": "lookahead"}'}
    assert speculation({"num_speculative_tokens": 7}, whole | {"spec_tokens": 3}) == {
        "method": "lookahead",
        "num_speculative_tokens": 3,
    }


@pytest.mark.parametrize(
    ("model", "keys", "expected"),
    [
        (
            "smollm2-135m-instruct",
            {"num_speculative_tokens": 5},
            {**FIRST, "num_speculative_tokens": 5},
        ),
        ("tiny", {"spec_tokens": 5}, {"num_speculative_tokens": 5}),
        (
            "smollm2-135m-instruct",
            {"num_speculative_tokens": 5, "quantization": "w8a8"},
            {**FIRST, "num_speculative_tokens": 5},
        ),
        (
            "smollm2-135m-instruct",
            {"ngram_prompt_lookup_max": 3},
            {"method": "ngram", "prompt_lookup_max": 3},
        ),
        ("smollm2-135m-instruct", {"spec_method": "suffix"}, {"method": "suffix"}),
        ("smollm2-135m-instruct", {"speculative_model": "./a"}, {"model": "./a"}),
    ],
)
def test_details_alone_leave_the_method_to_auto(model, keys, expected):
    assert speculation(keys, model=model) == expected
    assert speculation({"model": model} | keys, model="other") == expected
    assert speculation({"speculative_config": "auto"}, keys, model=model) == expected


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (
            [{"port": 1, "http_port": 2}],
            "http_port is 2; it must be left out where http_port is given, too",
        ),
        (
            [{"spec_tokens": 1, "num_speculative_tokens": 2}],
            "left out where num_speculative_tokens is given, too",
        ),
        (
            [{"speculative_config": {"num_speculative_tokens": 1}, "spec_tokens": 2}],
            "left out beside a speculative_config that has it",
        ),
        (
            [{"speculative_config": "none"}, {"spec_tokens": 2}],
            "left out where speculative_config is none",
        ),
        ([{"enable_chunked_prefill": 1}], "it must be true, or left out: long prompts"),
        (
            [{"model": ["a"], "spec_tokens": 2}],
            "model is ['a']; it must be a non-empty string",
        ),
    ],
)
def test_an_invalid_combination_is_rejected(sources, message):
    with pytest.raises(InvalidValueError) as caught:
        in_our_words(*sources)
    assert message in str(caught.value)


def test_an_older_spelling_is_logged_once(caplog):
    config = {"speculative_config": {"speculative_model": "./a"}, "spec_tokens": 2}
    assert speculation(config | {"speculative_disable_by_batch_size": 99}) == {
        "model": "./a",
        "num_speculative_tokens": 2,
        "speculation_threshold": 99,
    }
    assert len(caplog.records) == 1


def test_a_later_none_overrides_earlier_keys():
    read = in_our_words({"spec_tokens": 2}, {"speculative_config": "none"})
    assert read == {"speculative_config": None}
    assert ServeConfig.from_sources({"spec_tokens": 2}, read).speculative_config is None


def test_a_whole_configuration_file_of_vllm(tmp_path):
    path = tmp_path / "vllm.yaml"
    path.write_text(
        "model: tiny\nport: 8001\nspeculative-model: '[ngram]'\nnum-speculative-tokens: 4\n"
        "ngram-prompt-lookup-max: 3\nenable-chunked-prefill: true\n"
    )
    [config] = read_models(path)
    assert (config.model, config.http_port) == ("tiny", 8001)
    read = config.speculative_config
    assert (read.method, read.num_speculative_tokens) == ("ngram", 4)
    assert (read.drafter.prompt_lookup_min, read.drafter.prompt_lookup_max) == (3, 3)


@pytest.mark.parametrize("name", ["hf_token", "hf-token"])
def test_an_unknown_name_is_refused_without_its_value(name):
    with pytest.raises(InvalidValueError, match=r"hf.token") as caught:
        ServeConfig.from_sources({name: "hf_secret"})
    assert "hf_secret" not in str(caught.value)
