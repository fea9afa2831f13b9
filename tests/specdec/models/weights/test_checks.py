# Modules: specdec.models.weights.checks, specdec.models.weights.tensor_headers
"""The rule that each tensor of a checkpoint is what a model expects, from headers alone."""

import pytest

from specdec.models.weights.awq_gptq import Gptq
from specdec.models.weights.checks import check_tensors, stored_parts
from specdec.models.weights.tensor_headers import TensorHeader, TensorHeaders, text_model_headers
from specdec.types.errors import UnsupportedModelError

LINEAR = "model.layers.0.self_attn.q_proj"
EXPECTED = {f"{LINEAR}.weight": (8, 4), "model.norm.weight": (4,)}


def check(expected=EXPECTED, **changes):
    """Check a checkpoint with the expected tensors and others, {name: (dtype, shape)}."""
    headers = {name: TensorHeader("BF16", shape) for name, shape in EXPECTED.items()}
    headers |= {name: TensorHeader(*each) for name, each in changes.items()}
    return check_tensors(text_model_headers(headers), None, expected)


def test_a_checkpoint_without_faults():
    found = check()
    found.require()
    assert (found.unused, found.known_unused, found.num_quantized) == ("", "", 0)


def test_tensors_that_nothing_reads_are_summarized_by_kind():
    biases = {f"model.layers.{i}.self_attn.q_proj.bias": ("BF16", (8,)) for i in range(40)}
    found = check(**biases, **{"model.extra": ("F32", (1,))})
    assert found.faults == ()
    assert found.unused == (
        "41 tensors, model.layers.*.self_attn.q_proj.bias (40), model.extra (1)"
    )


def test_tensors_of_known_kinds_are_no_surprise():
    found = check(
        **{
            "model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", (2,)),
            "model.layers.0.self_attn.k_proj.k_scale": ("F32", ()),
            f"{LINEAR}.input_scale": ("F32", ()),
            "model.layers.5.eh_proj.weight": ("BF16", (4, 8)),
            "model.layers.5.self_attn.q_proj.weight": ("F8_E4M3", (8, 4)),
            "model.layers.5.self_attn.q_proj.weight_scale_inv": ("F32", (1, 1)),
            "model.mtp_layers.0.input_proj.weight": ("BF16", (4, 8)),
            "vision_tower.layers.0.weight": ("BF16", (4, 8)),
            "model.multi_modal_projector.norm.weight": ("BF16", (4,)),
            "language_model.lm_head.weight": ("BF16", (8, 4)),
        }
    )
    assert (found.faults, found.unused) == ((), "")
    assert found.known_unused.count(";") == 4
    assert "layers for drafting: 4 tensors" in found.known_unused


@pytest.mark.parametrize(
    ("name", "header", "words"),
    [
        (f"{LINEAR}.weight", ("F8_E4M3", (8, 4)), "has codes of type F8_E4M3"),
        (
            f"{LINEAR}.weight",
            ("BF16", (4, 8)),
            r"has shape \[4, 8\]; config.json requires \[8, 4\]",
        ),
        (f"{LINEAR}.weight_scale", ("F32", ()), "no described layout has a use for it"),
        (f"{LINEAR}.weight.absmax", ("F32", ()), "no described layout has a use for it"),
        ("model.norm.weight", ("I8", (4,)), "has codes of type I8"),
    ],
)
def test_a_tensor_that_is_not_understood_is_refused(name, header, words):
    found = check(**{name: header})
    assert len(found.faults) == 1
    with pytest.raises(UnsupportedModelError, match=words):
        found.require()


def test_all_faults_are_found_and_the_first_is_raised():
    missing = EXPECTED | {"model.a.weight": (1,), "model.b.weight": (1,)}
    found = check(missing)
    assert len(found.faults) == 2
    with pytest.raises(UnsupportedModelError, match=r"no tensor model\.a\.weight \(1 more fault"):
        found.require()


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((4,), "is no matrix"),
        ((8, 20), r"has shape \[2, 8\]; expected \[3, 8\]"),  # 20 values of 4 bits: 3 integers
    ],
)
def test_codes_of_other_shapes_are_refused(shape, words):
    headers = TensorHeaders({"a.qweight": TensorHeader("I32", (2, 8))})
    with pytest.raises(UnsupportedModelError, match=words):
        stored_parts(headers, Gptq(4, -1, 1), "a.weight", shape)
