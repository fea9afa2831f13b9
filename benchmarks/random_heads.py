"""Checkpoints of draft heads with random weights, in published layouts: for costs only."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specdec.models.config.model_config import ModelConfig

DRAFT_VOCAB = 8192

_NUM_MEDUSA_HEADS = 5

_BLOCK_SIZE, _NUM_BLOCK_LAYERS, _MARKOV_RANK = 7, 2, 256


def write_eagle3(directory: Path, target: ModelConfig) -> Path:
    """Write an EAGLE-3 head of the target's sizes, with its own output head of DRAFT_VOCAB."""
    size = target.hidden_size
    shapes = {
        "fc": (size, 3 * size),
        **_layer("midlayer", target, 2 * size),
        "lm_head": (_draft_vocab(target), size),
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    tensors = _matrices(shapes) | {f"midlayer.{name}.weight": torch.ones(size) for name in norms}
    tensors["norm.weight"] = torch.ones(size)
    tensors["d2t"] = _draft_tokens(target) - torch.arange(_draft_vocab(target))
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **_layer_fields(target),
        "num_hidden_layers": 1,
        "draft_vocab_size": _draft_vocab(target),
    }
    return _write(directory, config, tensors)


def write_dspark(directory: Path, target: ModelConfig) -> Path:
    """Write a DSpark head of two layers of the target's sizes, in DeepSpec's layout.

    It has blocks of 7, a vanilla Markov head of rank 256, and an output head of DRAFT_VOCAB.
    """
    size, layers = target.hidden_size, range(_NUM_BLOCK_LAYERS)
    last = target.num_layers - 3
    shapes = {
        "fc": (size, 3 * size),
        "lm_head": (_draft_vocab(target), size),
        "markov_head.markov_w1": (target.vocab_size, _MARKOV_RANK),
        "markov_head.markov_w2": (_draft_vocab(target), _MARKOV_RANK),
    }
    for index in layers:
        shapes |= _layer(f"layers.{index}", target, size)
    norms = ["hidden_norm", "norm"]
    for name in ("input_layernorm", "post_attention_layernorm"):
        norms += [f"layers.{index}.{name}" for index in layers]
    tensors = _matrices(shapes) | {f"{name}.weight": torch.ones(size) for name in norms}
    tensors["d2t"] = _draft_tokens(target) - torch.arange(_draft_vocab(target))
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "llama",
        **_layer_fields(target),
        "head_dim": target.head_dim,
        "num_hidden_layers": len(layers),
        "block_size": _BLOCK_SIZE,
        "mask_token_id": 0,
        "target_layer_ids": [1, last // 2, last],
        "markov_rank": _MARKOV_RANK,
    }
    return _write(directory, config, tensors)


def write_medusa(directory: Path, target: ModelConfig) -> Path:
    """Write Medusa heads, each with its own output head of DRAFT_VOCAB."""
    size, heads = target.hidden_size, range(_NUM_MEDUSA_HEADS)
    shapes = {f"blocks.{head}.layers.0": (size, size) for head in heads}
    shapes |= {f"lm_heads.{head}": (_draft_vocab(target), size) for head in heads}
    config = {
        "model_type": "medusa",
        "num_heads": len(heads),
        "num_hidden_layers": 1,
        "hidden_size": size,
        "vocab_size": target.vocab_size,
        "truncated_vocab_size": _draft_vocab(target),
    }
    return _write(directory, config, _matrices(shapes) | {"token_map": _draft_tokens(target)})


HEADS: Mapping[str, Callable[[Path, ModelConfig], Path]] = {
    "eagle3": write_eagle3,
    "dspark": write_dspark,
    "medusa": write_medusa,
}
"""Functions that write a checkpoint, by the method that drafts with it."""


def linear_shapes(config: ModelConfig, width: int) -> dict[str, tuple[int, int]]:
    """Return the shapes of a decoder layer's matrices; width: of the input of attention."""
    size, units = config.hidden_size, config.intermediate_size
    heads, kv_heads = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    return {
        "self_attn.q_proj": (heads, width),
        "self_attn.k_proj": (kv_heads, width),
        "self_attn.v_proj": (kv_heads, width),
        "self_attn.o_proj": (size, heads),
        "mlp.gate_proj": (units, size),
        "mlp.up_proj": (units, size),
        "mlp.down_proj": (size, units),
    }


def _layer(prefix: str, target: ModelConfig, width: int) -> dict[str, tuple[int, int]]:
    return {f"{prefix}.{name}": shape for name, shape in linear_shapes(target, width).items()}


def _layer_fields(target: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "rms_norm_eps": target.rms_norm_eps,
        "vocab_size": target.vocab_size,
    }


def _draft_tokens(target: ModelConfig) -> Tensor:
    """Return the target's ids of the draft tokens, ascending."""
    return torch.randperm(target.vocab_size)[: _draft_vocab(target)].sort().values


def _draft_vocab(target: ModelConfig) -> int:
    return min(DRAFT_VOCAB, target.vocab_size)


def _matrices(shapes: Mapping[str, tuple[int, int]]) -> dict[str, Tensor]:
    return {
        f"{name}.weight": torch.randn(shape, dtype=torch.float32).mul_(shape[1] ** -0.5).bfloat16()
        for name, shape in shapes.items()
    }


def _write(directory: Path, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory
