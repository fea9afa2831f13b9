"""A deterministic model: the bits of a token do not depend on its batch, nor on its steps."""

import pytest
import torch

from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.loading import load_model
from tests.specdec.fakes import run_ranks
from tests.specdec.models.families import save_family
from tests.specdec.tiny import tiny_llama_dir

BLOCK_SIZE, NUM_BLOCKS = 16, 12
ALONE = TensorParallelGroup()
TEXT = [(7 * index) % 300 + 3 for index in range(17)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_llama_dir(tmp_path_factory.mktemp("model"), layers=2)


def logits_of(directory, passes, *, deterministic=True, group=ALONE):
    """Run passes on an empty pool; return the logits of the last one's tokens."""
    model = load_model(
        directory,
        ModelConfig.from_directory(directory),
        group,
        dtype=torch.float32,
        max_model_len=128,
        block_size=BLOCK_SIZE,
        kernels="triton",
        deterministic=deterministic,
    )
    kv_cache = model.new_kv_cache(NUM_BLOCKS * BLOCK_SIZE)
    for chunks in passes:
        hidden = model(ForwardBatch(chunks, BLOCK_SIZE), kv_cache)
    return model.compute_logits(hidden)


def check(directory):
    """Compare the bits of TEXT alone, beside another, and in two steps, in tiles of 16 rows.

    Beside the other and in steps the text has other places in other tiles. Return its logits.
    """
    text, other = TEXT, Chunk([9, 8, 7, 6, 5] * 2, 0, [4, 5])
    whole = logits_of(directory, [[Chunk(text, 0, [1, 2])]])
    beside = logits_of(directory, [[other, Chunk(text, 0, [1, 2])]])
    assert torch.equal(beside[len(other.token_ids) :], whole)
    in_steps = logits_of(
        directory,
        [[Chunk(text[:14], 0, [1, 2])], [other, Chunk(text[14:], 14, [1, 2])]],
    )
    assert torch.equal(in_steps[len(other.token_ids) :], whole[14:])
    return whole


def test_bits_depend_neither_on_the_batch_nor_on_the_steps(directory):
    whole = check(directory)
    plain = logits_of(directory, [[Chunk(TEXT, 0, [1, 2])]], deterministic=False)
    assert torch.allclose(plain, whole, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt-oss", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("deepseek-v3", {}),  # the first layer has no experts
    ],
)
def test_bits_of_experts_sinks_and_latents(tmp_path, family, changes):
    save_family(tmp_path, family, num_hidden_layers=2, **changes)
    check(tmp_path)


@pytest.mark.usefixtures("one_launch_at_a_time")
def test_bits_of_several_ranks_do_not_depend_on_the_batch(directory):
    text, other = [(7 * index) % 300 + 3 for index in range(6)], Chunk([9, 8, 7], 0, [4])

    def on_rank(group):
        whole = logits_of(directory, [[Chunk(text, 0, [1])]], group=group)
        beside = logits_of(directory, [[other, Chunk(text, 0, [1])]], group=group)
        return torch.equal(beside[len(other.token_ids) :], whole)

    assert run_ranks(2, on_rank) == [True, True]
