"""Bytes that a forward pass must read at least, computed from the model's shape.

These are the matrices of all layers and the output head once, whatever the number of rows, and the
KV of each sequence once. Embeddings (one row per token) and norms (one vector) are not counted.
"""

from __future__ import annotations

from benchmarks.step_bench import PRECISIONS
from specdec.config.engine import DTYPE_BYTES
from specdec.models.config.model_config import ModelConfig


def held_bytes(config: ModelConfig, element_bytes: int) -> int:
    """Return the bytes of one stored weight when the model computes in elements of `element_bytes`.

    A float32 model keeps a 16-bit checkpoint in 16 bits.
    """
    return min(element_bytes, 2 if config.checkpoint_dtype in {"bfloat16", "float16"} else 4)


def weight_bytes(config: ModelConfig, precision: str) -> int:
    """Return the bytes of the matrices that each pass reads, without quantization scales."""
    known = PRECISIONS[precision]
    element_bytes = 1 if known.quantization else held_bytes(config, DTYPE_BYTES[known.dtype])
    attention = config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    mlp = 3 * config.hidden_size * config.intermediate_size
    head = config.vocab_size * config.hidden_size
    return element_bytes * (config.num_layers * (attention + mlp) + head)


def kv_bytes(config: ModelConfig, precision: str, num_tokens: int) -> int:
    """Return the bytes of the keys and values of `num_tokens` tokens in all layers."""
    heads = 2 * config.num_kv_heads * config.head_dim
    return num_tokens * config.num_layers * heads * DTYPE_BYTES[PRECISIONS[precision].dtype]


def pass_bytes(config: ModelConfig, precision: str, num_seqs: int, length: int) -> int:
    """Return the bytes read by a pass over `num_seqs` sequences of that length."""
    return weight_bytes(config, precision) + num_seqs * kv_bytes(config, precision, length)
