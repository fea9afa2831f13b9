"""Registry of the supported architectures: a new one is an entry here, and a block it may need.

An entry has what the family differs in from Llama. Defaults of keys, and the meaning of keys, are
those of the configuration classes of transformers 5. Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from specdec.models.config.architecture import Architecture
from specdec.models.config.families.dense import DENSE
from specdec.models.config.families.family_traits import (
    OLMO2,
    cohere_traits,
    gemma2_traits,
    gemma3_traits,
    gemma_traits,
    granite_traits,
    stablelm_traits,
)
from specdec.models.config.families.gemma4 import GEMMA4
from specdec.models.config.families.hunyuan import HUNYUAN
from specdec.models.config.families.llama4 import LLAMA4
from specdec.models.config.families.mistral import MISTRAL
from specdec.models.config.families.mixtures import MIXTURES
from specdec.models.config.families.other_mixtures import OTHER_MIXTURES
from specdec.models.config.families.sigmoid_mixtures import SIGMOID_MIXTURES
from specdec.models.config.families.sparse_attention import SPARSE_ATTENTION
from specdec.models.config.families.text_models import TEXT_MODELS
from specdec.models.config.hybrids.families import HYBRIDS
from specdec.models.config.layer_patterns import (
    last_layers_windows,
    one_window,
    periodic_windows,
    periodic_windows_if_any,
    rope_by_type,
    rope_on_some_layers,
    rope_on_windows,
    rope_on_windows_if_any,
    windows_without_rope,
)
from specdec.models.config.rope import rotary_fraction
from specdec.models.config.traits import Activation, DecoderTraits, NormKind, TensorNames

_QWEN_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_GRANITE_DEFAULTS = {
    f"{name}_multiplier": 1.0 for name in ("attention", "embedding", "residual")
} | {"logits_scaling": 1.0}
_GELU = Activation.GELU_TANH.value
_GLM_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
_GEMMA_DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True}
_GEMMA2_DEFAULTS = {
    **_GEMMA_DEFAULTS,
    "num_key_value_heads": 4,
    "hidden_activation": _GELU,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_COHERE_DEFAULTS = {"logit_scale": 0.0625, "tie_word_embeddings": True}

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "LlamaForCausalLM": Architecture(
            "llama",
            ("Llama 2, 3, 3.1, 3.2, 3.3", "SmolLM 1, 2", "TinyLlama", "Yi"),
            "biases by `attention_bias` and `mlp_bias`",
            qkv_bias="attention_bias",
            mlp_bias="mlp_bias",
        ),
        "MistralForCausalLM": Architecture(
            "mistral",
            ("Mistral 7B", "Mistral Nemo", "Mistral Small", "Ministral 8B"),
            "one sliding window for all layers, or none",
            {"num_key_value_heads": 8, "sliding_window": 4096},
            windows=one_window,
        ),
        "Qwen2ForCausalLM": Architecture(
            "qwen2",
            ("Qwen 2, 2.5", "QwQ 32B", "DeepSeek-R1-Distill-Qwen"),
            "QKV bias; windows on the last layers or by `layer_types`",
            _QWEN_DEFAULTS,
            qkv_bias=True,
            output_bias=False,
            windows=last_layers_windows,
        ),
        "Qwen3ForCausalLM": Architecture(
            "qwen3",
            ("Qwen 3, 0.6B to 32B",),
            "queries and keys normalized by head; windows as in Qwen 2",
            {**_QWEN_DEFAULTS, "head_dim": 128},
            qkv_bias="attention_bias",
            qk_norm=True,
            windows=last_layers_windows,
        ),
        "GraniteForCausalLM": Architecture(
            "granite",
            ("Granite 3.0 to 3.3",),
            "scaled embeddings, scores, residual stream and logits; biases as in Llama",
            _GRANITE_DEFAULTS,
            qkv_bias="attention_bias",
            mlp_bias="mlp_bias",
            traits=granite_traits,
        ),
        "SmolLM3ForCausalLM": Architecture(
            "smollm3",
            ("SmolLM3 3B",),
            "layers without rotary embedding; windows by `layer_types`; biases as in Llama",
            {
                "num_key_value_heads": 4,
                "no_rope_layer_interval": 4,
                "rope_theta": 2_000_000.0,
                "sliding_window": None,
                "tie_word_embeddings": True,
            },
            qkv_bias="attention_bias",
            mlp_bias="mlp_bias",
            windows=windows_without_rope,
            ropes=rope_on_some_layers,
        ),
        "Olmo2ForCausalLM": Architecture(
            "olmo2",
            ("OLMo 2 1B to 32B",),
            "norms after attention and MLP instead of before; queries and keys normalized over "
            "all heads",
            qkv_bias="attention_bias",
            qk_norm=True,
            traits=OLMO2,
        ),
        "Olmo3ForCausalLM": Architecture(
            "olmo3",
            ("OLMo 3 7B and 32B",),
            "as OLMo 2; windows on three of four layers; rotary scaling on the others",
            {"sliding_window": 4096, "rope_theta": 500_000.0},
            qkv_bias="attention_bias",
            qk_norm=True,
            windows=periodic_windows(4),
            ropes=rope_by_type("rope_theta"),
            traits=OLMO2,
        ),
        "Phi3ForCausalLM": Architecture(
            "phi3",
            ("Phi-3, Phi-3.5", "Phi-4, Phi-4 mini, Phi-4 reasoning"),
            "fused QKV and gate-up tensors; rotation of a part of each head; LongRoPE",
            {"original_max_position_embeddings": 4096, "sliding_window": None},
            windows=one_window,
            rotary_fraction=rotary_fraction,
            traits=DecoderTraits(names=TensorNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",))),
        ),
        "GlmForCausalLM": Architecture(
            "glm",
            ("GLM-4 9B (`-hf`)", "GLM-Edge"),
            "interleaved rotation of half of each head; fused gate-up tensor; QKV bias",
            _GLM_DEFAULTS,
            qkv_bias="attention_bias",
            output_bias=False,
            rotary_fraction=rotary_fraction,
            traits=DecoderTraits(
                is_rope_interleaved=True, names=TensorNames(gate_up=("gate_up_proj",))
            ),
        ),
        "Glm4ForCausalLM": Architecture(
            "glm4",
            ("GLM-4-0414 9B and 32B", "GLM-Z1"),
            "as GLM, with norms before and after attention and MLP",
            _GLM_DEFAULTS,
            qkv_bias="attention_bias",
            output_bias=False,
            rotary_fraction=rotary_fraction,
            traits=DecoderTraits(
                is_rope_interleaved=True,
                has_output_norms=True,
                names=TensorNames(
                    gate_up=("gate_up_proj",),
                    attention_output_norm="post_self_attn_layernorm",
                    mlp_output_norm="post_mlp_layernorm",
                ),
            ),
        ),
        "GemmaForCausalLM": Architecture(
            "gemma",
            ("Gemma 2B and 7B", "CodeGemma"),
            "scaled embeddings; gated GELU; norms whose weights are stored less one",
            {**_GEMMA_DEFAULTS, "num_key_value_heads": 16, "hidden_act": _GELU},
            # The first releases have `gelu` and mean the approximation.
            legacy_activations={"gelu": Activation.GELU_TANH},
            qkv_bias="attention_bias",
            traits=gemma_traits,
        ),
        "Gemma2ForCausalLM": Architecture(
            "gemma2",
            ("Gemma 2 2B, 9B and 27B",),
            "as Gemma, with norms before and after, soft-capped scores and logits, and windows on "
            "alternating layers",
            {
                **_GEMMA2_DEFAULTS,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
            },
            activation_key="hidden_activation",
            qkv_bias="attention_bias",
            windows=periodic_windows(2),
            traits=gemma2_traits,
        ),
        "Gemma3ForCausalLM": Architecture(
            "gemma3_text",
            ("Gemma 3 270M to 27B",),
            "as Gemma 2, without caps; queries and keys normalized by head; windows on five of six "
            "layers, with a rotary embedding of their own",
            {
                **_GEMMA2_DEFAULTS,
                "rope_theta": 1_000_000.0,
                "rope_local_base_freq": 10_000.0,
                # Missing in the larger models, whose text model is a part of them.
                "vocab_size": 262_208,
                "num_attention_heads": 8,
                "max_position_embeddings": 131_072,
                "rms_norm_eps": 1e-6,
            },
            activation_key="hidden_activation",
            qkv_bias="attention_bias",
            qk_norm=True,
            windows=periodic_windows(6, "sliding_window_pattern"),
            ropes=rope_by_type("rope_local_base_freq"),
            traits=gemma3_traits,
        ),
        "Starcoder2ForCausalLM": Architecture(
            "starcoder2",
            ("StarCoder2 3B, 7B and 15B",),
            "LayerNorm with bias; an MLP of GELU without a gate; biases by `use_bias`",
            {
                "num_key_value_heads": 2,
                "hidden_act": _GELU,
                "use_bias": True,
                "tie_word_embeddings": True,
                "sliding_window": None,
            },
            norm_eps_key="norm_epsilon",
            qkv_bias="use_bias",
            mlp_bias="use_bias",
            windows=one_window,
            traits=DecoderTraits(
                norm=NormKind.LAYER,
                has_norm_bias=True,
                has_gate=False,
                names=TensorNames(gate_up=("c_fc",), down="c_proj"),
            ),
        ),
        "CohereForCausalLM": Architecture(
            "cohere",
            ("Command R, R+", "Aya 23, Aya Expanse"),
            "attention and MLP in parallel; LayerNorm; interleaved rotation; scaled logits; "
            "queries and keys normalized by `use_qk_norm`",
            {**_COHERE_DEFAULTS, "rope_theta": 500_000.0},
            norm_eps_key="layer_norm_eps",
            qkv_bias="attention_bias",
            qk_norm="use_qk_norm",
            traits=cohere_traits,
        ),
        "Cohere2ForCausalLM": Architecture(
            "cohere2",
            ("Command R7B", "Command A"),
            "as Cohere; windows with rotation on three of four layers, neither on the others",
            {**_COHERE_DEFAULTS, "sliding_window": 4096},
            norm_eps_key="layer_norm_eps",
            qkv_bias="attention_bias",
            windows=periodic_windows(4, "sliding_window_pattern"),
            ropes=rope_on_windows,
            traits=cohere_traits,
        ),
        "SeedOssForCausalLM": Architecture(
            "seed_oss",
            ("Seed-OSS 36B",),
            "separate keys for the biases of QKV, output and MLP",
            {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
            qkv_bias="attention_bias",
            output_bias="attention_out_bias",
            mlp_bias="mlp_bias",
        ),
        "Ernie4_5ForCausalLM": Architecture(
            "ernie4_5",
            ("ERNIE 4.5 0.3B",),
            "interleaved rotation; biases by `use_bias`",
            {
                "num_key_value_heads": 2,
                "head_dim": 128,
                "tie_word_embeddings": True,
                "rope_theta": 500_000.0,
            },
            qkv_bias="use_bias",
            mlp_bias="use_bias",
            traits=DecoderTraits(is_rope_interleaved=True),
        ),
        "StableLmForCausalLM": Architecture(
            "stablelm",
            ("StableLM 3B, StableLM 2 1.6B",),
            "LayerNorm with bias; rotation of a quarter of each head; attention and MLP in "
            "parallel by `use_parallel_residual`",
            {"num_key_value_heads": 32, "partial_rotary_factor": 0.25},
            norm_eps_key="layer_norm_eps",
            qkv_bias="use_qkv_bias",
            output_bias=False,
            rotary_fraction=rotary_fraction,
            traits=stablelm_traits,
        ),
        "Exaone4ForCausalLM": Architecture(
            "exaone4",
            ("EXAONE 4.0 1.2B and 32B",),
            "norms after attention and MLP; queries and keys normalized by head; windows with "
            "rotation on three of four layers, neither on the others",
            {"num_key_value_heads": 32, "sliding_window": 4096},
            qk_norm=True,
            windows=periodic_windows_if_any(4, "sliding_window_pattern"),
            ropes=rope_on_windows_if_any,
            traits=DecoderTraits(has_input_norms=False, has_output_norms=True),
        ),
        **DENSE,
        **LLAMA4,
        **GEMMA4,
        **MISTRAL,
        **HUNYUAN,
        **MIXTURES,
        **OTHER_MIXTURES,
        **SIGMOID_MIXTURES,
        **SPARSE_ATTENTION,
        **HYBRIDS,
    }
)
"""The architectures by the name that config.json has for them."""

SUPPORTED_ARCHITECTURES = tuple(ARCHITECTURES)

SAME_DECODERS: Mapping[str, str] = MappingProxyType(
    {"MiMoForCausalLM": "Qwen2ForCausalLM", "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM"}
)
"""Architectures with the decoder of another one: layers for drafting beside it, or older names."""

_MODEL_TYPES = MappingProxyType(
    {each.model_type: name for name, each in ARCHITECTURES.items()}
    | {"mimo": "MiMoForCausalLM"}
    | {each.model_type: name for name, each in TEXT_MODELS.items()}
)


def architecture_of(model_type: str) -> str | None:
    """Return the architecture of a `model_type`, which a config.json may have alone; else None."""
    return _MODEL_TYPES.get(model_type)
