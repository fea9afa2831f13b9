# Modules: specdec.models.heads.formats.fused, specdec.models.heads.networks.fused
# Modules: specdec.models.heads.networks.recurrent, specdec.models.heads.networks.target
"""EAGLE-1 and 2 against the equations of the paper."""

import pytest
import torch
from safetensors.torch import load_file

from specdec.models.heads.config import HeadConfig
from specdec.types.errors import InvalidValueError, UnsupportedModelError
from tests.specdec.models.heads.driver import (
    HIDDEN,
    KERNELS,
    RANKS_AND_KERNELS,
    VOCAB,
    draft_logits,
    head_logits,
    save,
    selected_logits,
    sequences,
    weights,
)
from tests.specdec.models.heads.reference import Layers, drafted, layer, layer_shapes, linear, rms

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
}


def eagle_weights(bias=True, layers=1, extra=()):
    shapes = {"fc.weight": (HIDDEN, 2 * HIDDEN)} | ({"fc.bias": (HIDDEN,)} if bias else {})
    for index in range(layers):
        norms = ("input_layernorm",) if index else ()
        shapes |= layer_shapes(Layers(), HIDDEN, 40, index, norms=norms)
    return weights(shapes | dict.fromkeys(extra, (HIDDEN,)))


def reference(made, parts, target_dir, sizes=None, layers=1):
    """Return logits [B, K, V]; optional norms of ModelOpt apply if they have weights."""
    stored = load_file(target_dir / "model.safetensors")
    embedding = made.get("embed_tokens.weight", stored["model.embed_tokens.weight"])

    def norm(x, name):
        return rms(x, made[name]) if name in made else x

    def run(tokens, features):
        inputs = [norm(embedding[tokens], "enorm.weight"), norm(features, "hnorm.weight")]
        x = linear(torch.cat(inputs, dim=1), made, "fc")
        for index in range(layers):
            x = layer(x, made, f"layers.{index}", sizes or Layers())
        return x

    def to_logits(x):
        return norm(x, "norm.weight") @ stored["lm_head.weight"].T

    return torch.stack(
        [
            drafted(part, part.hidden, run, to_logits, lambda x: x, len(part.drafts))
            for part in parts
        ]
    )


@pytest.mark.parametrize(("size", "kernels"), RANKS_AND_KERNELS)
@pytest.mark.parametrize(
    ("bias", "file"), [(True, "pytorch_model.bin"), (False, "model.safetensors")]
)
def test_logits_equal_the_paper(tmp_path, target_dir, bias, file, size, kernels):
    made, parts = eagle_weights(bias), sequences()
    save(tmp_path, CONFIG, made, file)
    expected = reference(made, parts, target_dir)
    for borders in ((), (4, 9)):
        found = head_logits(
            tmp_path, target_dir, parts, size=size, kernels=kernels, borders=borders
        )
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("is_copy", [True, False])
@pytest.mark.parametrize("kernels", KERNELS)
def test_own_embedding(tmp_path, target_dir, is_copy, kernels):
    made, parts = eagle_weights(), sequences()
    target = load_file(target_dir / "model.safetensors")["model.embed_tokens.weight"]
    made["embed_tokens.weight"] = target.clone() if is_copy else target.flip(0).contiguous()
    save(tmp_path, CONFIG, made)
    found = head_logits(tmp_path, target_dir, parts, size=2, kernels=kernels)
    expected = reference(made, parts, target_dir)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_two_layers_and_norms_of_modelopt(tmp_path, target_dir):
    made = eagle_weights(False, 2, ("enorm.weight", "hnorm.weight", "norm.weight"))
    parts = sequences()
    save(tmp_path, CONFIG | {"num_hidden_layers": 2}, made)
    found = head_logits(tmp_path, target_dir, parts, borders=(5,))
    expected = reference(made, parts, target_dir, layers=2)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


HASS_NORMS = ("enorm.weight", "hnorm.weight", "norm.weight")
FIRST_NORM = "layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    ("switches", "used"),
    [
        (
            {"add_para_norm": True, "skip_prenorm": False, "skip_output_norm": False},
            (*HASS_NORMS, FIRST_NORM),
        ),
        ({"add_para_norm": True}, HASS_NORMS[:2]),
        ({"skip_prenorm": False}, (FIRST_NORM,)),
        ({}, ()),
    ],
)
@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_norms_of_hass_in_vllms_layout(tmp_path, target_dir, switches, used, file):
    """The file stores the layer's norm and the final one even where they are not applied."""
    made, parts = eagle_weights(True, 1, (*HASS_NORMS, FIRST_NORM)), sequences()
    if not switches.get("add_para_norm"):
        del made["enorm.weight"], made["hnorm.weight"]
    stored = {f"model.{name}" if name[0] in "ln" else name: each for name, each in made.items()}
    config = {"architectures": ["EAGLEModel"], "model_type": "eagle", "model": CONFIG | switches}
    save(tmp_path, config, stored, file)
    found = head_logits(tmp_path, target_dir, parts, borders=(5,))
    norms = {*HASS_NORMS, FIRST_NORM} - set(used)
    kept = {name: each for name, each in made.items() if name not in norms}
    torch.testing.assert_close(found, reference(kept, parts, target_dir), atol=1e-4, rtol=1e-4)


def test_norms_of_hass_need_their_tensors(tmp_path, target):
    made = eagle_weights()
    save(tmp_path, CONFIG | {"add_para_norm": True}, made)
    with pytest.raises(UnsupportedModelError, match=r"no tensor token_norm\.weight; expected"):
        HeadConfig.from_directory(tmp_path, target)
    extra = weights(dict.fromkeys(("enorm.weight", "hnorm.weight"), (HIDDEN,)))
    save(tmp_path, CONFIG | {"add_para_norm": False}, made | extra)
    with pytest.raises(UnsupportedModelError, match=r"tensor enorm\.weight .*; expected none"):
        HeadConfig.from_directory(tmp_path, target)


@pytest.mark.parametrize("size", [1, 2])
def test_draft_window(tmp_path, target_dir, target, size):
    made, parts = eagle_weights(), sequences()
    save(tmp_path, CONFIG, made)
    config = HeadConfig.from_directory(tmp_path, target, draft_window=6)
    assert "layers: 1, window 6, " in config.describe()[0]
    found = draft_logits(config, target_dir, parts, size=size, borders=(8,))
    expected = reference(made, parts, target_dir, Layers(window=6))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(found, reference(made, parts, target_dir), atol=1e-2)
    with pytest.raises(InvalidValueError, match="draft_window is 0; it must be from 1"):
        HeadConfig.from_directory(tmp_path, target, draft_window=0)


def test_a_draft_that_goes_on_for_one_sequence(tmp_path, target_dir):
    made, parts = eagle_weights(), sequences()
    save(tmp_path, CONFIG, made)
    found = selected_logits(tmp_path, target_dir, parts)
    expected = reference(made, parts, target_dir)[-1:]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(len(KERNELS) == 1, reason="no C++ compiler")
def test_quantized_matrices(tmp_path, target_dir):
    made, parts = eagle_weights(), sequences()
    save(tmp_path, CONFIG, made)
    found = head_logits(tmp_path, target_dir, parts, kernels="native", quantization="int8")
    expected = reference(made, parts, target_dir)
    assert 1e-4 < (found - expected).norm() / expected.norm() < 0.05


def test_sizes_and_description(tmp_path, target):
    made = eagle_weights()
    save(tmp_path, CONFIG, made, "pytorch_model.bin")
    config = HeadConfig.from_directory(tmp_path, target)
    assert (config.method, config.taps, config.feature_size) == ("eagle", (), HIDDEN)
    assert (config.num_kv_layers, config.max_draft_tokens) == (1, None)
    assert config.kv_bytes_per_token("float32") == 2 * 2 * 12 * 4
    assert config.weight_bytes("float32") == 4 * sum(each.numel() for each in made.values())
    assert config.describe() == (
        "taken for EAGLE: layers: 1, full attention, embedding first, no final norm, embedding of "
        "the target, output head of the target",
    )


def test_a_missing_rope_theta_is_reported_and_can_be_added(tmp_path, target_dir, target):
    from dataclasses import replace

    from specdec.models.config.rope import DefaultRope

    made, parts = eagle_weights(), sequences()
    save(tmp_path, CONFIG, made)
    target = replace(target, rope=DefaultRope(500_000.0))
    config = HeadConfig.from_directory(tmp_path, target)
    assert config.describe()[1] == (
        "config.json has no rope_theta: 10000 is assumed; if the acceptance is low, add the "
        'target\'s "rope_theta": 500000 to it'
    )
    save(tmp_path, CONFIG | {"rope_theta": 500_000}, made)
    config = HeadConfig.from_directory(tmp_path, target)
    assert len(config.describe()) == 1
    found = draft_logits(config, target_dir, parts)
    expected = reference(made, parts, target_dir, Layers(theta=500_000.0))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
