"""Models that read images or audio too, of which the text model is served alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class TextModel:
    """One kind of text model that a multimodal checkpoint may contain.

    model_type: of its `text_config`. architecture: the entry of the registry with its decoder.
    defaults: values of keys that config.json may omit, where they are not those of the entry.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WholeModel:
    """A model that reads more than text.

    model_type: by which a config.json without `architectures` is recognized. texts: the first is
    that of a `text_config` without `model_type`. may_be_flat: whether published files have the keys
    of the text model beside those of the whole.
    """

    model_type: str
    texts: tuple[TextModel, ...]
    may_be_flat: bool = False


_QWEN2_VL_DEFAULTS = {"num_key_value_heads": 8, "max_window_layers": 80, "rms_norm_eps": 1e-5}
_HEADS_OF_SIZE = {"head_dim": None}
_GLM4V = TextModel("glm4v_text", "Glm4ForCausalLM", _HEADS_OF_SIZE)

TEXT_MODELS: Mapping[str, WholeModel] = MappingProxyType(
    {
        "Gemma3ForConditionalGeneration": WholeModel(
            "gemma3", (TextModel("gemma3_text", "Gemma3ForCausalLM"),)
        ),
        "Gemma4ForConditionalGeneration": WholeModel(
            "gemma4", (TextModel("gemma4_text", "Gemma4ForCausalLM"),)
        ),
        "Llama4ForConditionalGeneration": WholeModel(
            "llama4", (TextModel("llama4_text", "Llama4ForCausalLM"),)
        ),
        "Mistral3ForConditionalGeneration": WholeModel(
            "mistral3",
            (
                TextModel("mistral", "MistralForCausalLM"),
                TextModel("ministral3", "Ministral3ForCausalLM"),
                TextModel("mistral4", "Mistral4ForCausalLM"),
            ),
        ),
        "Qwen2VLForConditionalGeneration": WholeModel(
            "qwen2_vl",
            (TextModel("qwen2_vl_text", "Qwen2ForCausalLM", _QWEN2_VL_DEFAULTS),),
            may_be_flat=True,
        ),
        "Qwen2_5_VLForConditionalGeneration": WholeModel(
            "qwen2_5_vl",
            (TextModel("qwen2_5_vl_text", "Qwen2ForCausalLM", _QWEN2_VL_DEFAULTS),),
            may_be_flat=True,
        ),
        "Qwen3VLForConditionalGeneration": WholeModel(
            "qwen3_vl",
            (TextModel("qwen3_vl_text", "Qwen3ForCausalLM", {"rope_theta": 500_000.0}),),
        ),
        "Qwen3VLMoeForConditionalGeneration": WholeModel(
            "qwen3_vl_moe",
            (
                TextModel(
                    "qwen3_vl_moe_text",
                    "Qwen3MoeForCausalLM",
                    {"num_key_value_heads": 16, "norm_topk_prob": True, "rope_theta": 500_000.0},
                ),
            ),
        ),
        "Qwen3_5ForConditionalGeneration": WholeModel(
            "qwen3_5", (TextModel("qwen3_5_text", "Qwen3_5ForCausalLM"),)
        ),
        "Qwen3_5MoeForConditionalGeneration": WholeModel(
            "qwen3_5_moe", (TextModel("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),)
        ),
        "Glm4vForConditionalGeneration": WholeModel("glm4v", (_GLM4V,)),
        "Glm46VForConditionalGeneration": WholeModel("glm46v", (_GLM4V,)),
        "Glm4vMoeForConditionalGeneration": WholeModel(
            "glm4v_moe",
            (TextModel("glm4v_moe_text", "Glm4MoeForCausalLM", {"attention_bias": True}),),
        ),
        "GlmOcrForConditionalGeneration": WholeModel(
            "glm_ocr",
            (
                TextModel(
                    "glm_ocr_text",
                    "Glm4ForCausalLM",
                    {"num_key_value_heads": 8, "attention_bias": False, **_HEADS_OF_SIZE},
                ),
            ),
        ),
        "HunYuanVLForConditionalGeneration": WholeModel(
            "hunyuan_vl",
            (
                TextModel(
                    "hunyuan_vl_text", "HunYuanDenseV1ForCausalLM", {"tie_word_embeddings": True}
                ),
            ),
            may_be_flat=True,
        ),
    }
)
"""The models by the name that config.json has for them."""


def without_image_positions(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys without the parts of a head that each axis of an image rotates.

    All tokens of a text have the same position on each axis, so that it is one rotation.
    """
    ropes = {
        name: _rope_of_text(raw[name])
        for name in ("rope_scaling", "rope_parameters")
        if isinstance(raw.get(name), dict)
    }
    return {**raw, **ropes}


_TEXT_TYPES = {"mrope": "default", "xdrope": "dynamic"}


def _rope_of_text(rope: Mapping[str, Any]) -> dict[str, Any]:
    kept = {
        key: value
        for key, value in rope.items()
        if not key.startswith("mrope_") and key != "xdrope_section"
    }
    for key in ("type", "rope_type"):
        if key in kept:
            kept[key] = _TEXT_TYPES.get(kept[key], kept[key])
    return kept
