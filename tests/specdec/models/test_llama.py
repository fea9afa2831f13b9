# Modules: specdec.models.layers.decoder_layer, specdec.models.layers.mlp
# Modules: specdec.models.layers.norm
"""The decoder against transformers, on one and several ranks."""

import pytest
import torch
from transformers import LlamaForCausalLM

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.llama import CausalDecoder
from specdec.models.loading import load_model
from specdec.models.weights.checkpoint import open_checkpoint
from specdec.types.errors import InvalidValueError, UnsupportedModelError
from tests.specdec.fakes import run_ranks
from tests.specdec.models.passes import BLOCK_SIZE, batch_of, in_pass_order, mixed_logits
from tests.specdec.tiny import tiny_llama_dir

TOLERANCE = 1e-4


def reference_logits(directory, ids):
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        return in_pass_order([model(torch.tensor([each])).logits[0] for each in ids])


@pytest.fixture(scope="module")
def ids():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 383, (40,), generator=generator).tolist() for _ in range(2)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_logits_equal_transformers(tmp_path, ids, size, tied, kernels):
    directory = tiny_llama_dir(tmp_path, tied=tied, sharded=not tied)
    parts = run_ranks(size, lambda group: mixed_logits(directory, ids, group, kernels=kernels))
    torch.testing.assert_close(
        torch.cat(parts, dim=1), reference_logits(directory, ids), atol=TOLERANCE, rtol=TOLERANCE
    )


@pytest.mark.parametrize(
    ("quantization", "size", "tied"),
    [("int8", 1, True), ("int8", 2, False), ("int8", 3, True), ("w8a8", 2, False)],
)
def test_quantized_logits_are_near_those_of_transformers(tmp_path, ids, quantization, size, tied):
    directory = tiny_llama_dir(tmp_path, tied=tied)
    parts = run_ranks(
        size, lambda group: mixed_logits(directory, ids, group, quantization=quantization)
    )
    found, expected = torch.cat(parts, dim=1), reference_logits(directory, ids)
    assert 0.001 < (found - expected).norm() / expected.norm() < 0.12
    assert (found.argmax(1) == expected.argmax(1)).float().mean() > 0.85


def test_a_rank_reads_only_its_shard(tiny_model_dir):
    config = ModelConfig.from_directory(tiny_model_dir)

    def elements_read(group):
        reader = open_checkpoint(tiny_model_dir, torch.float32)
        CausalDecoder(config, reader, group, 128, BLOCK_SIZE)
        return reader.num_elements_read

    (whole,) = run_ranks(1, elements_read)
    assert whole == config.num_parameters
    norms = (2 * config.num_layers + 1) * config.hidden_size
    shares = run_ranks(3, elements_read)
    assert sum(shares) == whole + 2 * norms
    assert max(shares) < 0.36 * whole


def test_a_tensor_of_another_shape_is_rejected(tiny_model_dir):
    reader = open_checkpoint(tiny_model_dir, torch.float32)
    with pytest.raises(UnsupportedModelError, match=r"norm\.weight has shape \[144\]; .* \[145\]"):
        reader.read("model.norm.weight", (145,))


def test_a_length_above_max_position_embeddings_is_rejected(tiny_model_dir):
    config = ModelConfig.from_directory(tiny_model_dir)
    with pytest.raises(InvalidValueError, match="max_model_len is 513; it must be from 1 to 512"):
        load_model(
            tiny_model_dir,
            config,
            TensorParallelGroup(),
            dtype=torch.float32,
            max_model_len=513,
            block_size=BLOCK_SIZE,
        )


def test_a_missing_tensor_is_named(tiny_model_dir):
    reader = open_checkpoint(tiny_model_dir, torch.float32)
    with pytest.raises(UnsupportedModelError, match="has no tensor lm_head"):
        reader.read("lm_head.weight", (1, 1))


def test_weights_can_be_bfloat16(tiny_model_dir, ids):
    config = ModelConfig.from_directory(tiny_model_dir)
    model = load_model(
        tiny_model_dir,
        config,
        TensorParallelGroup(),
        dtype=torch.bfloat16,
        max_model_len=128,
        block_size=BLOCK_SIZE,
    )
    cache = model.new_kv_cache(20 * BLOCK_SIZE)
    with torch.inference_mode():
        hidden = model(batch_of([(ids[0], 0, list(range(10)))]), cache)
        logits = model.compute_logits(hidden)
    reference = LlamaForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([ids[0]])).logits[0]
    assert torch.nn.functional.cosine_similarity(logits.float(), expected).min() > 0.99
