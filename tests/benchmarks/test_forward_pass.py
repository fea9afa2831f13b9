"""Bytes in the memory floor of a forward pass."""

import pytest

from benchmarks.forward_pass import _BLOCK_SIZE, CASES, Case
from specdec.models.config.model_config import ModelConfig

CONFIG = ModelConfig.from_dict(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 11,
        "hidden_size": 8,
        "intermediate_size": 5,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    },
    {},
)


def test_bytes_of_weights_and_kv():
    layer = 8 * (8 + 4 + 4) + 8 * 8 + 3 * 8 * 5 + 2 * 8
    kv_per_token = 2 * 2 * 2 * 2
    read = Case(3, 10, 2).num_bytes(CONFIG, weight_bytes=4, kv_bytes=2)
    assert read == 4 * (2 * layer + 8) + 2 * 3 * 12 * kv_per_token


@pytest.mark.parametrize("case", CASES.values())
def test_no_block_is_shared_by_two_sequences(case):
    batch = case.batch()
    assert batch.num_sequences == case.num_sequences
    assert batch.num_tokens == case.num_sequences * case.num_rows
    assert len(set(batch.block_tables.flatten().tolist())) == batch.block_tables.size
    assert batch.block_tables.shape[1] * _BLOCK_SIZE >= case.num_computed + case.num_rows
