"""Rotary scaling of GGUF files in the words of config.json."""

import math

import pytest

from specdec.models.config.rope import longest_context, read_rope
from specdec.models.gguf.rope import rope_parameters
from specdec.types.errors import UnsupportedModelError

SCALING = "rope.scaling"
FREQS, SHORT, LONG = (
    f"{each}.weight" for each in ("rope_freqs", "rope_factors_short", "rope_factors_long")
)


@pytest.mark.parametrize(
    ("keys", "factors", "expected"),
    [
        ({}, {}, {"rope_type": "default", "rope_theta": 10_000.0}),
        ({f"{SCALING}.type": "none", f"{SCALING}.factor": 4.0}, {}, {"rope_type": "default"}),
        ({f"{SCALING}.factor": 4.0}, {}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 4.0}, {}, {"rope_type": "linear", "factor": 4.0}),
        ({f"{SCALING}.type": "yarn"}, {}, {"rope_type": "default"}),
        (
            {
                f"{SCALING}.type": "yarn",
                f"{SCALING}.factor": 4.0,
                f"{SCALING}.attn_factor": 2.0,
                f"{SCALING}.original_context_length": 64,
                f"{SCALING}.yarn_beta_fast": 16.0,
            },
            {},
            {
                "rope_type": "yarn",
                "original_max_position_embeddings": 64,
                "beta_fast": 16.0,
                "beta_slow": 1.0,
                "attention_factor": 2 * (1 + 0.1 * math.log(4)),
            },
        ),
        (
            {f"{SCALING}.factor": 2.0},
            {FREQS: [1.0, 8.0]},
            {"rope_type": "longrope", "short_factor": [2.0, 16.0], "long_factor": [2.0, 16.0]},
        ),
        (
            {f"{SCALING}.attn_factor": 1.2},
            {SHORT: [1.0, 2.0], LONG: [1.0, 3.0]},
            {"short_factor": [1.0, 2.0], "long_factor": [1.0, 3.0], "attention_factor": 1.2},
        ),
    ],
)
def test_scaling_has_a_type_of_config_json(keys, factors, expected):
    found = rope_parameters(keys, factors)
    assert expected.items() <= found.items()
    read_rope({"rope_parameters": found, "max_position_embeddings": 512})


@pytest.mark.parametrize(("original", "longest"), [(None, 512), (256, 1024)])
def test_yarn_extends_a_given_original_context_alone(original, longest):
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": original}
    found = rope_parameters({f"{SCALING}.{name}": each for name, each in scaling.items()}, {})
    raw = {"rope_parameters": found, "max_position_embeddings": 512}
    assert longest_context(raw) == longest
    assert read_rope(raw).original_max_position_embeddings == (original or 512)


@pytest.mark.parametrize(
    ("keys", "factors", "named"),
    [
        ({f"{SCALING}.type": "ntk", f"{SCALING}.factor": 2.0}, {}, "rope.scaling.type"),
        ({f"{SCALING}.type": "longrope"}, {}, "rope.scaling.type"),
        ({f"{SCALING}.attn_factor": 2.0}, {}, "attn_factor"),
        ({f"{SCALING}.type": "yarn", f"{SCALING}.factor": 2.0}, {FREQS: [1.0]}, "type"),
        ({}, {SHORT: [1.0]}, "tensors"),
        ({}, {FREQS: [1.0], LONG: [1.0]}, "tensors"),
    ],
)
def test_scaling_without_such_a_type_is_refused(keys, factors, named):
    with pytest.raises(UnsupportedModelError, match=named):
        rope_parameters(keys, factors)
