# Modules: specdec.models.config.families.text_models
"""Text models in models that read images too: the same logits, from their place in the files."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.decoder_tensors import decoder_tensors
from specdec.models.config.model_config import ModelConfig
from specdec.models.weights.checks import check_tensors
from specdec.models.weights.tensor_headers import text_model_headers, text_name
from specdec.models.weights.weight_files import read_headers
from specdec.types.errors import UnsupportedModelError
from tests.specdec.models.families import FAMILIES, SIZES, config_class
from tests.specdec.models.family_features import ALPHA, SIGMOID_EXPERTS
from tests.specdec.models.passes import in_pass_order, mixed_logits
from tests.specdec.tiny import random_model

VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_PATCHES = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 8,
    "out_hidden_size": 90,
}
_AXES = {"rope_theta": 1e3, "rope_type": "default"}
_GLM = {"rope_parameters": {**_AXES, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}}
_WITHOUT_HEAD_DIM = {"hidden_size": 144, "head_dim": None}
MODELS = {
    "gemma3": ("Gemma3", {**FAMILIES["gemma3"][1], "final_logit_softcapping": None}, VISION),
    "gemma4": ("Gemma4", FAMILIES["gemma4"][1], VISION),
    "llama4": (
        "Llama4",
        FAMILIES["llama4"][1],
        {**VISION, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
    ),
    "mistral3": ("Mistral3", FAMILIES["mistral"][1], VISION),
    "mistral3-ministral3": ("Mistral3", FAMILIES["ministral3"][1], VISION),
    "mistral3-mistral4": ("Mistral3", FAMILIES["mistral4"][1], VISION),
    "qwen2-vl": (
        "Qwen2VL",
        {
            **_WITHOUT_HEAD_DIM,
            "rope_parameters": {**_AXES, "mrope_section": [2, 3, 3]},
        },
        {"depth": 1, "embed_dim": 16, "hidden_size": 144, "num_heads": 2, "patch_size": 8},
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        {
            **_WITHOUT_HEAD_DIM,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
            "rope_parameters": {**_AXES, "mrope_section": [2, 3, 3]},
        },
        {**_PATCHES, "out_hidden_size": 144, "fullatt_block_indexes": [0]},
    ),
    "qwen3-vl": (
        "Qwen3VL",
        {
            "attention_bias": True,
            "rope_parameters": {**_AXES, "mrope_section": [2, 3, 3], "mrope_interleaved": True},
        },
        {**_PATCHES, "deepstack_visual_indexes": [0]},
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 47,
            "mlp_only_layers": [1],
            "rope_parameters": {**_AXES, "mrope_section": [2, 3, 3], "mrope_interleaved": True},
        },
        {**_PATCHES, "deepstack_visual_indexes": [0]},
    ),
    "glm4v": (
        "Glm4v",
        {**_GLM, **_WITHOUT_HEAD_DIM, "pad_token_id": 0},
        {**_PATCHES, "out_hidden_size": 144},
    ),
    "glm4.6v": (
        "Glm46V",
        {**_GLM, **_WITHOUT_HEAD_DIM, "pad_token_id": 0},
        {**_PATCHES, "out_hidden_size": 144},
    ),
    "glm4v-moe": (
        "Glm4vMoe",
        {**_GLM, **SIGMOID_EXPERTS, "attention_bias": True},
        _PATCHES,
    ),
    "glm-ocr": ("GlmOcr", {**_GLM, "pad_token_id": 0}, _PATCHES),
    "hunyuan-vl": (
        "HunYuanVL",
        {"rope_parameters": {**ALPHA, "rope_type": "xdrope", "xdrope_section": [2, 2, 2, 2]}},
        {**VISION, "text_hidden_size": 90, "out_hidden_size": 90},
    ),
}
"""The family in transformers, the configuration of its text model and that of its other part."""


def text_config(whole, changes):
    """Return the configuration of a text model in the whole of a configuration class."""
    if whole == "Mistral3":
        names = {"mistral": "Mistral", "ministral3": "Ministral3", "mistral4": "Mistral4"}
        family = next(name for name in names if FAMILIES[name][1] is changes)
        return config_class(names[family])(**{**SIZES, **changes})
    name = "Glm4v" if whole == "Glm46V" else whole
    return getattr(transformers, f"{name}Config").sub_configs["text_config"](**{**SIZES, **changes})


_SLOW = ("mistral3-ministral3", "qwen2-vl", "qwen3-vl", "glm4.6v", "glm4v-moe", "glm-ocr")


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=[pytest.mark.slow] * (each in _SLOW)) for each in MODELS],
)
def model(request, tmp_path_factory):
    """A directory of a whole model, and the model of transformers."""
    name, changes, vision = MODELS[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    text = text_config(name, changes)
    text.tie_word_embeddings = False
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=vision, tie_word_embeddings=False
    )
    whole = random_model(getattr(transformers, f"{name}ForConditionalGeneration"), config, seed=3)
    for name, bias in whole.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.uniform_(bias, generator=torch.Generator().manual_seed(3))
    whole.set_attn_implementation("eager")
    whole.set_experts_implementation("eager")
    whole.save_pretrained(directory)
    return directory, whole


def ids():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, 300, (40,), generator=generator).tolist() for _ in range(2)]


def test_logits_equal_transformers(model):
    directory, whole = model
    with torch.inference_mode():
        expected = [whole(input_ids=torch.tensor([each])).logits[0] for each in ids()]
    found = mixed_logits(directory, ids(), TensorParallelGroup())
    torch.testing.assert_close(found, in_pass_order(expected), atol=1e-4, rtol=1e-4)
    assert ModelConfig.from_directory(directory).text_part_of == type(whole).__name__


def test_tensors_of_other_media_are_known(model):
    directory, _ = model
    headers = text_model_headers(read_headers((directory / "model.safetensors",)))
    expected = decoder_tensors(ModelConfig.from_directory(directory), headers)
    found = check_tensors(headers, None, expected)
    assert (found.faults, found.unused) == ((), "")
    assert found.known["parts that read images or audio"]


@pytest.mark.parametrize("model", ["gemma3", "mistral3-mistral4"], indirect=True)
@pytest.mark.parametrize("place", ["model.language_model.", "language_model.model.", "model."])
def test_each_place_of_the_text_model_is_known(model, tmp_path, place):
    directory, _ = model
    expected = mixed_logits(directory, ids(), TensorParallelGroup())
    stored = load_file(directory / "model.safetensors").items()
    names = ((text_name(name), tensor) for name, tensor in stored)
    tensors = {
        f"{place}{name.removeprefix('model.')}" if "lm_head" not in name else name: tensor
        for name, tensor in names
        if name.startswith(("lm_head", "model.layers", "model.embed", "model.norm"))
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    assert torch.equal(mixed_logits(tmp_path, ids(), TensorParallelGroup()), expected)


@pytest.mark.parametrize("place", ["model.language_model.", "language_model.model.", "model."])
@pytest.mark.parametrize(
    ("published", "name"),
    [
        ("block_sparse_moe.input_linear.weight", "block_sparse_moe.experts.gate_up_proj"),
        ("feedforward_layer_norm.weight", "post_attention_layernorm.weight"),
    ],
)
def test_published_names_are_known_in_each_place(place, published, name):
    assert text_name(f"{place}layers.0.{published}") == f"model.layers.0.{name}"


def test_the_quantization_of_the_whole_is_that_of_the_text_model(model):
    raw = json.loads((model[0] / "config.json").read_text())
    assert ModelConfig.from_dict(raw, {}).stored_quantization == ()
    raw["quantization_config"] = {"quant_method": "fp8"}
    assert ModelConfig.from_dict(raw, {}).stored_quantization == ("fp8",)


def test_keys_of_the_text_model_may_be_beside_those_of_the_whole():
    """As in the published files of Qwen 2.5 VL."""
    own = {
        **{name: size for name, size in SIZES.items() if name != "head_dim"},
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    }
    flat = {"model_type": "qwen2_5_vl", "vision_config": {"depth": 1}, **own}
    nested = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "text_config": own}
    assert ModelConfig.from_dict(flat, {}) == ModelConfig.from_dict(nested, {})


def test_the_keys_that_gemma_leaves_out_have_the_defaults_of_transformers():
    given = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": given}
    expected = transformers.Gemma3TextConfig(**given)
    config = ModelConfig.from_dict(whole, {})
    assert config.vocab_size == expected.vocab_size
    assert config.num_heads == expected.num_attention_heads
    assert config.num_kv_heads == expected.num_key_value_heads
    assert config.max_position_embeddings == expected.max_position_embeddings
    assert config.rms_norm_eps == expected.rms_norm_eps
    assert config.tie_word_embeddings
    assert config.rope.theta == expected.rope_parameters["full_attention"]["rope_theta"]


@pytest.mark.parametrize(
    ("text_config", "message"),
    [
        (None, r"text_config .* must be an object"),
        ({"model_type": "ministral3"}, r"text_config\.model_type .* must be gemma3_text"),
    ],
)
def test_another_text_model_is_refused(text_config, message):
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text_config}
    with pytest.raises(UnsupportedModelError, match=message):
        ModelConfig.from_dict(raw, {})
