"""Settings of drafting and of the training of heads, as a service reads them."""

import json
import typing

import pytest

from cluster.config.serve_config import ServeConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.config.speculative_keys import read_value
from specdec.types.errors import InvalidValueError


def test_auto_drafts_with_ngram_for_a_model_without_an_alias():
    ngram = SpeculativeConfig.of("ngram", 3)
    assert ServeConfig(model="/models/tiny").speculative_config == ngram
    assert ServeConfig.from_mapping({"speculative_config": "auto", "model": "tiny"}) == (
        ServeConfig(model="tiny")
    )
    assert not ngram.is_auto


def test_a_given_configuration_is_not_replaced_by_a_faster_drafter():
    default = ServeConfig().speculative_config
    for given in (default.to_mapping(), {"num_speculative_tokens": 3}, {"policy": "threshold"}):
        assert not ServeConfig.from_mapping(
            {"speculative_config": given}
        ).speculative_config.is_auto


def test_a_service_accepts_drafts_by_chance_only_if_a_flag_allows_it():
    speculation = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
    given = {"speculative_config": speculation}
    with pytest.raises(InvalidValueError, match="unless allow_synthetic_acceptance is given"):
        ServeConfig.from_mapping(given)
    config = ServeConfig.from_mapping({**given, "allow_synthetic_acceptance": True})
    assert config.speculative_config.verifier == "synthetic"


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"num_speculative_tokens": "3"}, "speculative_config.num_speculative_tokens"),
        ({"num_speculative_tokens": True}, "speculative_config.num_speculative_tokens"),
        ({"num_speculative_tokens": 33}, "speculative_config.num_speculative_tokens"),
        ({"speculation_threshold": 4097}, "speculative_config.speculation_threshold"),
        ({"method": "oracle"}, "speculative_config.method"),
        ({"method": ["ngram"]}, "speculative_config.method"),
    ],
)
def test_speculative_config_is_validated(value, field):
    with pytest.raises(InvalidValueError) as caught:
        ServeConfig.from_mapping({"speculative_config": value})
    assert caught.value.field == field


def test_values_of_speculation_are_read_by_their_type():
    names, threshold = tuple[typing.Literal["a", "b"], ...], float | typing.Literal["auto"]
    assert read_value("names", ["a", "b"], names) == ("a", "b")
    assert read_value("names", ("a",), names) == ("a",)
    assert read_value("threshold", 0.5, threshold) == 0.5
    assert read_value("threshold", "auto", threshold) == "auto"
    assert read_value("share", 1, float) == 1
    for name, wrong, expected, message in (
        ("names", "a", names, "names is 'a'; it must be a list"),
        ("names", ["a", 3], names, r"names\[1\] is 3; it must be a string"),
        ("threshold", True, threshold, "threshold is True; it must be a number or a string"),
        ("share", "1", float, "share is '1'; it must be a number"),
    ):
        with pytest.raises(InvalidValueError, match=rf"^{message}$"):
            read_value(name, wrong, expected)


@pytest.mark.parametrize("none", [None, "none"])
def test_speculation_can_be_turned_off(none):
    assert ServeConfig.from_mapping({"speculative_config": none}).speculative_config is None


def test_speculation_may_be_json():
    mapping = {"method": "ngram", "num_speculative_tokens": 5}
    config = ServeConfig.from_mapping({"speculative_config": json.dumps(mapping)})
    assert config == ServeConfig.from_mapping({"speculative_config": mapping})
    assert config.speculative_config == SpeculativeConfig.of(num_speculative_tokens=5)


@pytest.mark.parametrize(
    ("speculation", "is_accepted"),
    [
        ({"method": "medusa", "model": "head"}, True),
        ({"method": "ngram", "fallback": {"method": "medusa", "model": "head"}}, True),
        ({"model": "a method that its files determine"}, True),
        ({"method": "ngram"}, False),
        ({"method": "draft_model", "model": "draft"}, False),
        (None, False),
    ],
)
def test_answers_are_kept_only_for_a_draft_head(speculation, is_accepted):
    settings = {"speculative_config": speculation, "training_buffer_tokens": 1000}
    if is_accepted:
        assert ServeConfig.from_mapping(settings).training_buffer_tokens == 1000
    else:
        with pytest.raises(InvalidValueError, match="training_buffer_tokens is 1000; it must be 0"):
            ServeConfig.from_mapping(settings)


def test_a_salt_of_training_needs_a_buffer():
    assert ServeConfig(training_buffer_tokens=9, training_cache_salt="a").training_cache_salt == "a"
    with pytest.raises(InvalidValueError, match="training_cache_salt is 'a'; it must be left out"):
        ServeConfig(training_cache_salt="a")
