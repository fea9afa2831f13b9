import pytest

from specdec.models.config.rope import (
    DefaultRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    YarnRope,
    longest_context,
    read_rope,
    rotary_fraction,
)
from specdec.types.errors import UnsupportedModelError

LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}


def read(**raw):
    return read_rope({"max_position_embeddings": 4096, **raw})


def test_an_empty_config_has_the_default_theta():
    assert read() == DefaultRope(10_000.0)
    assert read(rope_theta=5e5, rope_scaling=None) == DefaultRope(5e5)


def test_theta_is_read_from_both_keys():
    scaling = {"type": "linear", "factor": 2}
    assert read(rope_theta=5e5, rope_scaling=scaling) == LinearRope(5e5, 2.0)
    inside = {"rope_type": "linear", "factor": 2, "rope_theta": 7e3}
    assert read(rope_theta=5e5, rope_parameters=inside) == LinearRope(7e3, 2.0)


def test_dynamic_scaling_has_no_effect_up_to_max_position_embeddings():
    assert read(rope_parameters={"rope_type": "dynamic", "factor": 4.0}) == DefaultRope(10_000.0)


def test_the_original_length_may_be_in_both_places_or_missing():
    inside = {**LLAMA3, "original_max_position_embeddings": 1024}
    expected = Llama3Rope(10_000.0, 8.0, 1.0, 4.0, 1024)
    assert read(rope_scaling=inside) == expected
    beside = {"rope_scaling": {**LLAMA3}, "original_max_position_embeddings": 1024}
    assert read(**beside) == expected
    nowhere = read(rope_scaling=LLAMA3)
    assert isinstance(nowhere, Llama3Rope)
    assert nowhere.original_max_position_embeddings == 4096


def test_yarn_has_the_defaults_of_the_paper():
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    rope = read(rope_scaling={**scaling, "finetuned": True})
    assert isinstance(rope, YarnRope)
    assert (rope.beta_fast, rope.beta_slow, rope.truncate) == (32.0, 1.0, True)
    assert rope.attention_factor == pytest.approx(0.1 * 1.3862943611 + 1)


def test_the_attention_factor_of_yarn_is_multiplied_by_attn_factor():
    published = {"type": "yarn", "factor": 4.0, "attn_factor": 0.8782488562869419}
    of_distilled = read(rope_scaling={**published, "extrapolation_factor": 1.0})
    assert of_distilled.attention_factor == pytest.approx(1.0)  # DeepSeek-R1-0528-Qwen3-8B
    by_mscale = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    assert read(rope_scaling={**by_mscale, "attn_factor": 0.5}).attention_factor == 0.5
    given = {**published, "attention_factor": 1.5}
    assert read(rope_scaling=given).attention_factor == 1.5


def test_longrope_has_the_attention_factor_of_the_paper():
    lists = {"short_factor": [1, 2], "long_factor": [3, 4]}
    rope = read(rope_scaling={"type": "longrope", **lists}, original_max_position_embeddings=1024)
    assert isinstance(rope, LongRope)
    assert rope.attention_factor == pytest.approx((1 + 1.3862943611 / 6.9314718056) ** 0.5)
    assert rope.factors(1024) == (1, 2)
    assert rope.factors(1025) == (3, 4)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, 4096),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16_384),
        ({"rope_type": "linear", "factor": 2, "original_max_position_embeddings": 4096}, 8192),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 4096),
        ({"type": "yarn", "factor": 4.0}, 4096),  # max_position_embeddings is extended already
        ({**LLAMA3, "original_max_position_embeddings": 4096}, 4096),
    ],
)
def test_a_scaling_extends_the_original_context(scaling, expected):
    assert longest_context({"max_position_embeddings": 4096, "rope_scaling": scaling}) == expected


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_an_original_context_beside_the_scaling_wins(kind):
    scaling = {"type": kind, "factor": 4.0, "original_max_position_embeddings": 512}
    raw = {"max_position_embeddings": 4096, "original_max_position_embeddings": 2048}
    assert longest_context({**raw, "rope_scaling": scaling}) == 8192
    del scaling["original_max_position_embeddings"]
    assert longest_context({**raw, "rope_scaling": scaling}) == 8192


@pytest.mark.parametrize("factor", [1e300, 2.0**21])
@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_an_extended_context_has_the_limit_of_the_other_one(kind, factor):
    scaling = {"type": kind, "factor": factor, "original_max_position_embeddings": factor}
    message = r"factor is .*; it must be at most 2147483647 / original_max_position_embeddings \("
    with pytest.raises(UnsupportedModelError, match=message):
        longest_context({"max_position_embeddings": 4096, "rope_scaling": scaling})
    largest = {"type": kind, "factor": 1.0, "original_max_position_embeddings": 2**31 - 1}
    assert longest_context({"max_position_embeddings": 1, "rope_scaling": largest}) == 2**31 - 1


def test_a_part_of_a_head_may_be_rotated_where_that_is_known():
    raw = {"max_position_embeddings": 4096, "partial_rotary_factor": 0.5}
    assert rotary_fraction(raw) == 0.5
    assert read_rope(raw, may_be_partial=True) == DefaultRope(10_000.0)
    nested = {"rope_parameters": {"partial_rotary_factor": 0.25}}
    assert rotary_fraction({**raw, **nested}) == 0.25


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"rope_type": "ntk"},
            "ntk is not supported; supported: default, linear, dynamic, llama3, yarn, longrope",
        ),
        ({"rope_type": "linear"}, "factor is None; it must be a number above 0"),
        ({"rope_type": "linear", "factor": "2"}, "factor is '2'; it must be a number above 0"),
        ({"rope_type": "linear", "factor": True}, "factor is True; it must be"),
        ({"rope_type": "linear", "factor": float("inf")}, "factor is inf; it must be"),
        ({"rope_type": "yarn", "factor": 0}, "factor is 0; it must be"),
        ({"rope_type": "yarn", "factor": 4, "attn_factor": "1"}, "attn_factor is '1'; it must be"),
        (
            {"rope_type": "yarn", "factor": 4, "extrapolation_factor": 0.5},
            "extrapolation_factor is 0.5; it must be 1.0",
        ),
        ({"rope_theta": -1.0}, "rope_theta is -1.0; it must be"),
        ({**LLAMA3, "low_freq_factor": 5}, r"high_freq_factor is 4.0; .* low_freq_factor \(5.0\)"),
        ({"rope_type": "longrope"}, "short_factor is None; it must be a list of numbers above 0"),
        ({"rope_type": "longrope", "short_factor": [0]}, "short_factor is 0; it must be a number"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; it must be 1.0"),
        ({"mrope_section": [1, 2]}, "rope parameters with mrope_section are not supported"),
        ({"full_attention": {}}, "rope parameters with full_attention are not supported"),
    ],
)
def test_unsupported_parameters_are_rejected(parameters, message):
    with pytest.raises(UnsupportedModelError, match=message):
        read(rope_parameters=parameters)
