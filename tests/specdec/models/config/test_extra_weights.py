"""Memory of weights beside those of one model, against the loaded weights of ranks."""

import pytest

from specdec.config.engine import ModelOptions
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.extra_weights import copied_bytes
from specdec.models.config.model_config import ModelConfig
from specdec.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from tests.specdec.fakes import run_ranks
from tests.specdec.models.families import save_family
from tests.specdec.models.foreign import save_foreign
from tests.specdec.models.transformers.test_transformers_decoder import load

LINEAR = (ColumnParallelLinear, RowParallelLinear)


def num_weights(directory, group):
    """Return the weights of a rank in the linear layers of the decoder's layers."""
    modules = load(directory, group=group, kernels="torch").layers.modules()
    return sum(each.matrix.weight.numel() for each in modules if isinstance(each, LINEAR))


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "deepseek-v2", "deepseek-v3"])
def test_copies_of_shared_heads_latents_and_routers(tmp_path, family, size):
    save_family(tmp_path, family)
    config = ModelConfig.from_directory(tmp_path)
    one = num_weights(tmp_path, TensorParallelGroup())
    ranks = sum(num_weights(tmp_path, TensorParallelGroup(rank, size)) for rank in range(size))
    assert copied_bytes(config, "float32", size) == 4 * (ranks - one)
    assert (ranks > one) == (size > 1)


def test_quantized_copies_are_smaller_but_for_routers(tmp_path):
    save_family(tmp_path, "deepseek-v3")
    config = ModelConfig.from_directory(tmp_path)
    routers = 2 * 8 * config.hidden_size  # of two layers with eight experts
    plain, quantized = (copied_bytes(config, "bfloat16", 3, each) for each in (None, "int8"))
    assert plain - quantized == (plain - 2 * 2 * routers) // 2


@pytest.mark.parametrize("tied", [True, False])
def test_copies_of_an_embedding_by_transformers_code(tmp_path, tied):
    save_foreign(tmp_path, "gpt-neox", tie_word_embeddings=tied)
    config = ModelConfig.from_directory(tmp_path, ModelOptions("auto"))

    def num_in_matrices(group):
        weights = load(tmp_path, group=group)._model.parameters()
        return sum(each.numel() for each in weights if each.dim() == 2)

    [one], ranks = (run_ranks(size, num_in_matrices) for size in (1, 3))
    assert copied_bytes(config, "float32", 1) == 0
    assert copied_bytes(config, "float32", 3) == 4 * (sum(ranks) - one)
