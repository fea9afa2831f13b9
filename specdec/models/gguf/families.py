"""The architectures of GGUF files that are converted: their keys and the names of their tensors.

A key or a tensor that is not in these tables is refused: it could decide the output. llama.cpp's
converters are the reference of what the values mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
}
_RMS_EPS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}


def _named(stems: Mapping[str, str], *suffixes: str) -> dict[str, str]:
    """Return the names of tensors in GGUF and in Hugging Face files."""
    kinds = suffixes or ("weight",)
    return {f"{a}.{kind}": f"{b}.{kind}" for a, b in stems.items() for kind in kinds}


_QKV = {f"attn_{each}": f"self_attn.{each}_proj" for each in "qkv"}
_OUTPUT = {"attn_output": "self_attn.o_proj"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_QK_NORMS = {f"attn_{each}_norm": f"self_attn.{each}_norm" for each in "qk"}
_MLP = {f"ffn_{each}": f"mlp.{each}_proj" for each in ("gate", "up", "down")}
_GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {f"ffn_{each}_exps": f"mlp.experts.*.{each}_proj" for each in ("gate", "up", "down")}


@dataclass(frozen=True)
class GGUFFamily:
    """One architecture.

    required, optional: keys of config.json by those of the file, without the prefix. constants:
    further ones. layer: tensors of each layer, in which * is the number of an expert. biases: a key
    of config.json, and the tensors of each layer that are there if it is true; empty for none.
    final_norm: kinds of tensors of the last norm. pairs_rows: whether each head's rotated rows are
    neighbours. norm_offset: added to the weights of norms in the file. is_partly_rotated: whether
    fewer dimensions of a head than all may be. has_local_rope: whether layers with windows have a
    rotary embedding of their own, without scaling. large: number of layers of the size whose query
    scale is that of hidden_size / heads; 0 where no such scale is stored.
    """

    architecture: str
    model_type: str
    layer: Mapping[str, str]
    required: Mapping[str, str]
    optional: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    biases: tuple[str, Mapping[str, str]] = ("", MappingProxyType({}))
    final_norm: tuple[str, ...] = ("weight",)
    pairs_rows: bool = False
    norm_offset: float = 0.0
    is_partly_rotated: bool = False
    has_local_rope: bool = False
    large: int = 0


_LLAMA_LAYER = _named({**_QKV, **_OUTPUT, **_NORMS, **_MLP})
_QWEN3_ATTENTION = {**_QKV, **_OUTPUT, **_NORMS, **_QK_NORMS}
_GEMMA_LAYER = {**_QKV, **_OUTPUT, **_GEMMA_NORMS, **_MLP}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_FINAL_CAP = {"final_logit_softcapping": "final_logit_softcapping"}
_BOTH = ("weight", "bias")

FAMILIES: Mapping[str, GGUFFamily] = MappingProxyType(
    {
        "llama": GGUFFamily(
            "LlamaForCausalLM", "llama", _LLAMA_LAYER, {**_SIZES, **_RMS_EPS}, pairs_rows=True
        ),
        "qwen2": GGUFFamily(
            "Qwen2ForCausalLM",
            "qwen2",
            {**_LLAMA_LAYER, **_named(_QKV, "bias")},
            {**_SIZES, **_RMS_EPS},
        ),
        "qwen3": GGUFFamily(
            "Qwen3ForCausalLM",
            "qwen3",
            _named({**_QWEN3_ATTENTION, **_MLP}),
            {**_SIZES, **_RMS_EPS},
        ),
        "qwen3moe": GGUFFamily(
            "Qwen3MoeForCausalLM",
            "qwen3_moe",
            _named({**_QWEN3_ATTENTION, **_EXPERTS, "ffn_gate_inp": "mlp.gate"}),
            {
                **_SIZES,
                **_RMS_EPS,
                "expert_count": "num_experts",
                "expert_used_count": "num_experts_per_tok",
                "expert_feed_forward_length": "moe_intermediate_size",
            },
            {"expert_weights_norm": "norm_topk_prob"},
            {"norm_topk_prob": True},
        ),
        "phi3": GGUFFamily(
            "Phi3ForCausalLM",
            "phi3",
            _named(
                {
                    **{"attn_qkv": "self_attn.qkv_proj", **_OUTPUT, **_NORMS},
                    **{"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
                }
            ),
            {**_SIZES, **_RMS_EPS},
            _WINDOW,
            is_partly_rotated=True,
        ),
        "gemma2": GGUFFamily(
            "Gemma2ForCausalLM",
            "gemma2",
            _named(_GEMMA_LAYER),
            {**_SIZES, **_RMS_EPS, **_WINDOW},
            {**_FINAL_CAP, "attn_logit_softcapping": "attn_logit_softcapping"},
            norm_offset=1.0,
            large=46,
        ),
        "gemma3": GGUFFamily(
            "Gemma3ForCausalLM",
            "gemma3_text",
            _named({**_GEMMA_LAYER, **_QK_NORMS}),
            {**_SIZES, **_RMS_EPS, **_WINDOW},
            {**_FINAL_CAP, "attention.sliding_window_pattern": "sliding_window_pattern"},
            norm_offset=1.0,
            has_local_rope=True,
            large=62,
        ),
        "stablelm": GGUFFamily(
            "StableLmForCausalLM",
            "stablelm",
            {**_named({**_QKV, **_OUTPUT, **_MLP}), **_named(_NORMS, *_BOTH)},
            {**_SIZES, "attention.layer_norm_epsilon": "layer_norm_eps"},
            constants={"use_parallel_residual": False},
            biases=("use_qkv_bias", _named(_QKV, "bias")),
            final_norm=_BOTH,
            is_partly_rotated=True,
        ),
        "starcoder2": GGUFFamily(
            "Starcoder2ForCausalLM",
            "starcoder2",
            _named(
                {**_QKV, **_OUTPUT, **_NORMS, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
                *_BOTH,
            ),
            {**_SIZES, "attention.layer_norm_epsilon": "norm_epsilon"},
            final_norm=_BOTH,
        ),
    }
)
"""By the architecture that a file names."""

IGNORED_KEYS = frozenset(
    {
        "vocab_size",  # that of the embeddings is read
        "tensor_data_layout",  # a note
        "use_parallel_residual",  # the tensors decide, as in llama.cpp
    }
)
TOKENIZER_KEYS = frozenset(
    f"tokenizer.ggml.{each}"
    for each in (
        *("model", "pre", "tokens", "scores", "token_type", "merges"),
        *("bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id"),
        *("unknown_token_id", "padding_token_id"),
        *("add_bos_token", "add_eos_token", "add_space_prefix"),
        # They decide no output of a prompt: other tasks and notes.
        *("token_type_count", "seperator_token_id", "separator_token_id", "cls_token_id"),
        *("mask_token_id", "prefix_token_id", "suffix_token_id", "middle_token_id"),
        "add_sep_token",
        *(f"fim_{each}_token_id" for each in ("pre", "suf", "mid", "pad", "rep", "sep")),
    )
)
IGNORED_PREFIXES = ("tokenizer.chat_template", "tokenizer.huggingface.")
"""Templates, of which the default and that for tools are read, and the files of the original."""
