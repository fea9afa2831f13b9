"""Text models in models that read images too: the same logits, from their place in the files."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.types.errors import UnsupportedModelError
from tests.specdec.models.families import FAMILIES, SIZES, config_class
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
MODELS = {"Gemma3": "gemma3", "Mistral3": "mistral"}
"""The families by the name that transformers has for the whole, and their text models."""


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    """A directory of a whole model, and the model of transformers."""
    name, directory = request.param, tmp_path_factory.mktemp(request.param)
    family, changes = FAMILIES[MODELS[name]]
    # The whole Gemma 3 has no cap of logits.
    changes = {**changes, "final_logit_softcapping": None, "tie_word_embeddings": False}
    text = config_class(family)(**{**SIZES, **changes})
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=VISION, tie_word_embeddings=False
    )
    whole = random_model(getattr(transformers, f"{name}ForConditionalGeneration"), config, seed=3)
    whole.config._attn_implementation = "eager"
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


def test_both_places_of_the_text_model_are_known(model, tmp_path):
    directory, _ = model
    expected = mixed_logits(directory, ids(), TensorParallelGroup())
    stored = load_file(directory / "model.safetensors")
    assert any(name.startswith("language_model.model.layers.0.") for name in stored)
    tensors = {
        name.replace("language_model.model.", "model.language_model.").replace(
            "language_model.lm_head.", "lm_head."
        ): tensor
        for name, tensor in stored.items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    assert torch.equal(mixed_logits(tmp_path, ids(), TensorParallelGroup()), expected)


def test_the_quantization_of_the_whole_is_that_of_the_text_model(model):
    raw = json.loads((model[0] / "config.json").read_text())
    assert ModelConfig.from_dict(raw, {}).stored_quantization is None
    raw["quantization_config"] = {"quant_method": "fp8"}
    assert ModelConfig.from_dict(raw, {}).stored_quantization == "fp8"


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
