"""Apertus and Arcee: Llama with an MLP without a gate."""

from __future__ import annotations

from collections.abc import Mapping

from specdec.models.config.architecture import Architecture
from specdec.models.config.traits import Activation, DecoderTraits, TensorNames

DENSE: Mapping[str, Architecture] = {
    "ApertusForCausalLM": Architecture(
        "apertus",
        ("Apertus 8B and 70B",),
        "an MLP of xIELU without a gate; queries and keys normalized by head",
        {
            "hidden_act": Activation.XIELU.value,
            "rope_theta": 12_000_000.0,
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        },
        qkv_bias="attention_bias",
        qk_norm=True,
        legacy_activations={Activation.XIELU.value: Activation.XIELU},
        traits=DecoderTraits(
            has_gate=False,
            names=TensorNames(
                gate_up=("up_proj",),
                input_norm="attention_layernorm",
                mlp_norm="feedforward_layernorm",
            ),
        ),
    ),
    "ArceeForCausalLM": Architecture(
        "arcee",
        ("AFM 4.5B",),
        "an MLP of squared ReLU without a gate; biases as in Llama",
        {"hidden_act": Activation.RELU2.value},
        legacy_activations={Activation.RELU2.value: Activation.RELU2},
        qkv_bias="attention_bias",
        mlp_bias="mlp_bias",
        traits=DecoderTraits(has_gate=False, names=TensorNames(gate_up=("up_proj",))),
    ),
}
