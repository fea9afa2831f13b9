"""Tiny random checkpoints of architectures that only transformers' modelling code runs."""

import torch
import transformers

from tests.specdec.models.families import WINDOW
from tests.specdec.tiny import random_model

LAYERS = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
LATENT = {
    "num_key_value_heads": 6,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}

FOREIGN = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {}),
    "gpt-bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", {"multi_query": True}),
    "opt": ("OPTForCausalLM", "OPTConfig", {"ffn_dim": 101, "word_embed_proj_dim": 48}),
    "phi": ("PhiForCausalLM", "PhiConfig", {"partial_rotary_factor": 0.5}),
    "nemotron": ("NemotronForCausalLM", "NemotronConfig", {}),
    "vault-gemma": (
        "VaultGemmaForCausalLM",
        "VaultGemmaConfig",
        {**LAYERS, "head_dim": 16, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 6.0},
    ),
    "ministral": ("MinistralForCausalLM", "MinistralConfig", {**LAYERS, "head_dim": 16}),
    "aria-text": (
        "AriaTextForCausalLM",
        "AriaTextConfig",
        {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 2},
    ),
    "youtu": ("YoutuForCausalLM", "YoutuConfig", LATENT),
    "helium": ("HeliumForCausalLM", "HeliumConfig", {"head_dim": 16}),
    "persimmon": ("PersimmonForCausalLM", "PersimmonConfig", {}),
}
"""Names of the tests: model and configuration classes, and changes of the configuration."""

PLANNED = {
    "qwen2-moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "solar-open": (
        "SolarOpenForCausalLM",
        "SolarOpenConfig",
        {
            "head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 33,
        },
    ),
    "granite-moe": (
        "GraniteMoeForCausalLM",
        "GraniteMoeConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "apertus": ("ApertusForCausalLM", "ApertusConfig", {}),
}
"""Architectures of the registry, by whose plans in transformers ranks are tested."""

IN_MAKE_TEST = ["gpt2", "opt", "nemotron", "vault-gemma", "youtu"]

SIZES = {
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 101,
    "vocab_size": 383,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def save_foreign(directory, name, **changes):
    """Write a tiny random model."""
    model, config, own = {**FOREIGN, **PLANNED}[name]
    kind = getattr(transformers, config)
    groups = {"num_key_value_heads": 3} if hasattr(kind(), "num_key_value_heads") else {}
    config = kind(**{**SIZES, **groups, **own, **changes})
    random_model(getattr(transformers, model), config, seed=3).save_pretrained(directory)


def reference_logits(directory, ids):
    """Return the logits of transformers' own attention and experts, for each sequence."""
    implementations = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, **implementations
    ).eval()
    with torch.inference_mode():
        return [model(torch.tensor([each])).logits[0] for each in ids]
