# Modules: specdec.models.config.families.sparse_attention, specdec.models.config.attention.latent
# Modules: specdec.models.layers.indexer, specdec.kernels.reference.indexed_attention
"""Families with an indexer: layers that choose, short contexts, values that are refused."""

import pytest
import torch

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.decoder_tensors import in_context
from specdec.models.config.model_config import ModelConfig
from specdec.models.loading import load_model
from specdec.types.errors import InvalidValueError, UnsupportedModelError
from tests.specdec.models.families import reference_model, save_family
from tests.specdec.models.passes import batch_of

KEYS = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, {0, 1, 2, 3, 4, 5}),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 2}, {0, 1, 4}),
        ({"index_topk_pattern": "FSSFSF"}, {0, 3, 5}),
        ({"indexer_types": ["full", *["shared"] * 5], "index_topk_pattern": "FFFFFF"}, {0}),
    ],
)
def test_layers_that_choose(changes, layers):
    config = ModelConfig.from_dict(KEYS | changes, {})
    assert config.latent.indexer.layers == layers
    dense = in_context(config, 2048)
    assert dense.latent.indexer is None
    assert in_context(config, 2049) == config
    assert config.kv_values_per_token(0, 1) == 6 * (512 + 64 + 128)
    assert dense.kv_values_per_token(0, 1) == 6 * (512 + 64)
    of_layer = 2048 * 32 * 128 + 64 * (128 + 32) + 2 * 128
    assert config.num_parameters - dense.num_parameters == len(layers) * of_layer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_lora_rank": None}, "q_lora_rank in config.json is None; it must be a number"),
        ({"index_head_dim": 32}, r"index_head_dim .* at least qk_rope_head_dim \(64\)"),
        ({"index_topk": 0}, "index_topk .* a whole number from 1"),
        ({"indexer_types": ["shared"] * 6}, "indexer_types .* full in the first layer"),
        ({"index_topk_pattern": "FSX"}, "index_topk_pattern in config.json is 'FSX'"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave .* must be true"),
        ({"num_hidden_layers": 10_001, "indexer_types": []}, "num_hidden_layers .* at most 10000"),
        ({"layer_types": ["full_attention"] * 6}, "layer_types .* 6 times indexed_attention"),
    ],
)
def test_other_values_are_refused(changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        ModelConfig.from_dict(KEYS | changes, {})


def load(directory, max_model_len, **settings):
    return load_model(
        directory,
        ModelConfig.from_directory(directory),
        TensorParallelGroup(),
        dtype=torch.float32,
        max_model_len=max_model_len,
        block_size=4,
        **settings,
    )


def test_a_context_of_the_chosen_tokens_needs_no_indexer(tmp_path):
    save_family(tmp_path, "glm5")
    model, ids = load(tmp_path, 9, kernels="auto"), [5, 6, 7, 8, 9, 10, 11, 12, 13]
    cache = model.new_kv_cache(12)
    with torch.inference_mode():
        found = model.compute_logits(model(batch_of([(ids, 0, [2, 0, 1])]), cache))
        expected = reference_model(tmp_path)(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(InvalidValueError, match="at most 9, the tokens that a query attends to"):
        load(tmp_path, 10, device=torch.device("meta"))
