"""Registry of the supported architectures with recurrent layers, a part of `registry`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from specdec.config.json_values import count, positive, unsupported
from specdec.models.config.architecture import Architecture
from specdec.models.config.recurrent import Recurrent, ShortConvolution
from specdec.models.config.traits import DecoderTraits, TensorNames

_FULL, _CONVOLUTION = "full_attention", "conv"


def _lfm2_canonical(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of LFM2 under the names, and with the meaning, of other families."""
    size = count(raw, "block_ff_dim", count(raw, "intermediate_size"))
    if raw["block_auto_adjust_ff_dim"]:
        size = 2 * size // 3
        if raw["block_ffn_dim_multiplier"] is not None:
            multiple = count(raw, "block_multiple_of")
            size = int(positive(raw, "block_ffn_dim_multiplier") * size)
            size = -(-size // multiple) * multiple
    is_tied = raw.get("tie_embedding", raw["tie_word_embeddings"])
    return {**raw, "intermediate_size": size, "tie_word_embeddings": is_tied}


def _lfm2_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    del raw
    names = TensorNames(
        input_norm="operator_norm",
        mlp_norm="ffn_norm",
        final_norm="embedding_norm",
        attention_output="out_proj",
        qk_norms=("q_layernorm", "k_layernorm"),
        mlp="feed_forward",
        gate_up=("w1", "w3"),
        down="w2",
    )
    return DecoderTraits(names=names)


def _lfm2_recurrent(raw: Mapping[str, Any], num_layers: int) -> Recurrent | None:
    attending = raw.get("full_attn_idxs")
    default = [
        _FULL if attending is None or index in attending else _CONVOLUTION
        for index in range(num_layers)
    ]
    kind = ShortConvolution(
        count(raw, "hidden_size"), count(raw, "conv_L_cache"), bool(raw.get("conv_bias"))
    )
    if kind.kernel_size < 2:
        raise unsupported("conv_L_cache", kind.kernel_size, "at least 2")
    return recurrent_layers(raw.get("layer_types") or default, num_layers, _CONVOLUTION, kind)


def recurrent_layers(
    types: object, num_layers: int, name: str, kind: ShortConvolution
) -> Recurrent | None:
    """Return the layers whose type has `name`; None without any.

    Raises UnsupportedModelError for other types than that and full attention, and without a layer
    of full attention.
    """
    allowed = {_FULL, name}
    if not isinstance(types, list) or len(types) != num_layers or not allowed.issuperset(types):
        limit = f"{num_layers} times {' or '.join(sorted(allowed))}"
        raise unsupported("layer_types", types, limit)
    if _FULL not in types:
        raise unsupported("layer_types", types, f"such that a layer has {_FULL}")
    layers = frozenset(index for index, each in enumerate(types) if each == name)
    return Recurrent(layers, kind) if layers else None


HYBRIDS: Mapping[str, Architecture] = MappingProxyType(
    {
        "Lfm2ForCausalLM": Architecture(
            "lfm2",
            ("LFM2 350M, 700M, 1.2B, 2.6B",),
            "short convolutions in place of attention on most layers; queries and keys normalized "
            "by head",
            {
                "num_key_value_heads": 8,
                "intermediate_size": 12288,
                "max_position_embeddings": 128_000,
                "norm_eps": 1e-5,
                "rope_theta": 1_000_000.0,
                "conv_L_cache": 3,
                "block_multiple_of": 256,
                "block_ffn_dim_multiplier": 1.0,
                "block_auto_adjust_ff_dim": True,
                "tie_word_embeddings": True,
            },
            norm_eps_key="norm_eps",
            qk_norm=True,
            traits=_lfm2_traits,
            recurrent=_lfm2_recurrent,
            canonical=_lfm2_canonical,
        ),
    }
)
