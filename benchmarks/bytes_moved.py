"""What a forward pass must read, computed from the model's shape: the least that any could move.

The matrices of all layers and of the head once, whatever the number of rows, and the KV of each
sequence once. Embeddings are a row a token, and norms a vector: neither counts.
"""

from __future__ import annotations

from benchmarks.step_bench import PRECISIONS
from specdec.config.engine import DTYPE_BYTES
from specdec.models.config import ModelConfig


def held_bytes(config: ModelConfig, element_bytes: int) -> int:
    """Of a weight, in a data type of so many: a checkpoint of 16 bits takes no more in fp32."""
    return min(element_bytes, 2 if config.checkpoint_dtype in {"bfloat16", "float16"} else 4)


def weight_bytes(config: ModelConfig, precision: str) -> int:
    """Of the matrices that every pass reads; scales of quantized ones, a number a row, aside."""
    known = PRECISIONS[precision]
    element_bytes = 1 if known.quantization else held_bytes(config, DTYPE_BYTES[known.dtype])
    attention = config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    mlp = 3 * config.hidden_size * config.intermediate_size
    head = config.vocab_size * config.hidden_size
    return element_bytes * (config.num_layers * (attention + mlp) + head)


def kv_bytes(config: ModelConfig, precision: str, num_tokens: int) -> int:
    """Keys and values of so many tokens, in all layers."""
    heads = 2 * config.num_kv_heads * config.head_dim
    return num_tokens * config.num_layers * heads * DTYPE_BYTES[PRECISIONS[precision].dtype]


def pass_bytes(config: ModelConfig, precision: str, num_seqs: int, length: int) -> int:
    """Of a pass over so many sequences of that length."""
    return weight_bytes(config, precision) + num_seqs * kv_bytes(config, precision, length)
