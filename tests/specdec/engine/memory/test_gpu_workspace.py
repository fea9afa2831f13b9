# Modules: specdec.config.gpu.truncation_search
"""Memory of a GPU beside weights and KV: what the steps of a rank allocate is reserved."""

import dataclasses

import pytest

from specdec.config.engine import MOST_UPDATE_PARTS
from specdec.config.gpu.graph_sizes import MAX_GRAPH_TOKENS, num_ragged_graphs, num_tree_sizes
from specdec.config.gpu.truncation_search import (
    MAX_CANDIDATES,
    NUM_THRESHOLDS,
    TILE_TOKENS,
    search_bytes,
)
from specdec.config.llm import LLMConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.memory.gpu_workspace import attention_bytes, gpu_workspace_bytes
from specdec.models.config.attention.latent import Latent
from specdec.models.config.model_config import ModelConfig

CONFIG = LLMConfig(
    model="tiny",
    device="cuda",
    dtype="bfloat16",
    max_num_seqs=16,
    max_num_batched_tokens=4096,
    enforce_eager=True,
    speculative_config=SpeculativeConfig.of("ngram", 3),
)


@pytest.fixture
def model(tiny_model_dir):
    return ModelConfig.from_directory(tiny_model_dir)


def reserved(model, *, drafts=False, **changes):
    return gpu_workspace_bytes(dataclasses.replace(CONFIG, **changes), model, drafts=drafts)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("rank", [16, 48])
def test_products_with_adapters_are_counted_in_parts(model, drafts, rank):
    """Float32 parts of the largest step, of queries, keys and values, at the padded rank."""
    without = reserved(model, drafts=drafts)
    found = reserved(model, drafts=drafts, enable_lora=True, max_lora_rank=rank) - without
    padded_rank = {16: 16, 48: 64}[rank]
    assert found == 4096 * MOST_UPDATE_PARTS * 3 * padded_rank * 4


def test_products_of_the_heads_of_latents_are_counted(model):
    """Where they are more: with the rows that the heads multiply, in parts of 256 inputs."""
    latent = Latent(512, 1536, 128, 64, 128, is_rope_interleaved=True)
    deepseek = dataclasses.replace(model, num_heads=128, num_kv_heads=1, latent=latent)
    found = reserved(deepseek, enable_lora=True, max_lora_rank=16) - reserved(deepseek)
    assert found == 4096 * 128 * (2 * 16 * 4 + 512 * 2)


@pytest.mark.parametrize("max_num_seqs", [16, 2048])
def test_logits_are_those_of_graphs_and_of_operators(model, max_num_seqs):
    more = dataclasses.replace(model, vocab_size=model.vocab_size + 1)
    num_tokens = 4 * max_num_seqs
    seen = max_num_seqs  # counts of output tokens, for penalties
    for is_eager, of_graphs in ((True, 0), (False, min(num_tokens, MAX_GRAPH_TOKENS))):
        sizes = {"max_num_seqs": max_num_seqs, "enforce_eager": is_eager}
        found = reserved(more, **sizes) - reserved(model, **sizes)
        assert found == (num_tokens + of_graphs + seen) * 4


def test_each_row_has_a_search_for_its_floor(model):
    """Candidates in int32, and the weights of two rounds for one more tile in float32."""
    more = dataclasses.replace(model, vocab_size=model.vocab_size + TILE_TOKENS)
    of_tile = 2 * NUM_THRESHOLDS * 4
    seen = 16 * TILE_TOKENS * 4  # counts of output tokens, for penalties
    found = reserved(more) - reserved(model) - seen
    assert found == 4 * 16 * (TILE_TOKENS * 4 + of_tile)
    assert search_bytes(model.vocab_size) >= MAX_CANDIDATES * 4 + of_tile


@pytest.mark.parametrize(("max_num_seqs", "num_scored"), [(16, 16 * 25), (256, 2048)])
def test_trees_have_graphs_and_more_logits(model, max_num_seqs, num_scored):
    trees = SpeculativeConfig.of("ngram", 3, num_draft_tree_tokens=24)
    sizes = {"max_num_seqs": max_num_seqs, "enforce_eager": True}
    without = reserved(model, **sizes)
    chains = 4 * max_num_seqs
    with_trees = dataclasses.replace(CONFIG, speculative_config=trees)
    parts = attention_bytes(with_trees, model) - attention_bytes(CONFIG, model)
    assert parts > 0  # of more than 16 tokens of a sequence
    found = reserved(model, **sizes, speculative_config=trees) - without
    of_row = model.vocab_size * 4 + search_bytes(model.vocab_size)
    assert found == (num_scored - chains) * of_row + parts
    sizes["enforce_eager"] = False
    of_graphs = min(num_scored, 2048) - min(chains, 2048)
    num_graphs = num_tree_sizes(max_num_seqs, 24) + num_ragged_graphs(
        max_num_seqs, CONFIG.max_num_batched_tokens, model.hidden_size
    )
    beside = reserved(model, **sizes, speculative_config=trees) - reserved(model, **sizes)
    assert beside == found + parts + of_graphs * of_row + num_graphs * 6 * 2**20


@pytest.mark.parametrize(("is_eager", "num_graphs"), [(True, 0), (False, 12)])
def test_a_head_that_drafts_trees_has_graphs_for_some_sequences(model, is_eager, num_graphs):
    """Up to 81 sequences with 24 nodes each: 1, 2, 4, eight up to 64, and 80."""
    choices = [[0], [0, 0], [0, 0, 0], *([rank] for rank in range(1, 22))]

    def beside_eagle(method, **changes):
        by_level, found = (
            reserved(
                model,
                max_num_seqs=256,
                enforce_eager=is_eager,
                speculative_config=SpeculativeConfig.of(
                    name, 3, model="head", num_draft_tree_tokens=24, **options
                ),
            )
            for name, options in (("eagle3", {}), (method, changes))
        )
        return (found - by_level) / 2**20 + num_graphs * 9

    best_first = {beside_eagle(each) for each in ("medusa", "p_eagle", "dflash", "dspark")}
    assert best_first == {num_graphs * 3}
    by_host = {beside_eagle("hydra"), beside_eagle("mlp_speculator")}
    assert by_host | {beside_eagle("medusa", medusa_choices=choices)} == {0}


@pytest.mark.parametrize(("is_eager", "num_copies"), [(True, 3), (False, 6)])
def test_what_ranks_exchange_is_counted(model, is_eager, num_copies):
    """A share of the rows of logits counts as sent, as received and as put together."""
    changes = {"enforce_eager": is_eager}
    alone = reserved(model, **changes)
    found = reserved(model, tensor_parallel_size=2, **changes) - alone
    assert found == 512 * 2**20 + num_copies * (16 * 4 * model.vocab_size) * 4 // 2
    many = dataclasses.replace(model, vocab_size=2**20)
    found = reserved(many, tensor_parallel_size=4, **changes) - reserved(many, **changes)
    assert found == 512 * 2**20 + num_copies * 2**26 * 4 // 4


@pytest.mark.parametrize(("num_engines", "num_tokens"), [(1, 1024), (2, 1536), (5, 2560)])
def test_a_draft_worker_has_logits_for_a_step_of_one_engine_and_for_graphs_of_all(
    model, num_engines, num_tokens
):
    """Each of 256 sequences has two tokens, and the largest graph has 2048."""
    draft = SpeculativeConfig.of("draft_model", 3)
    config = LLMConfig(device="cuda", max_num_seqs=256, speculative_config=draft, dtype="bfloat16")
    few, many = (
        gpu_workspace_bytes(
            config,
            dataclasses.replace(model, vocab_size=size),
            drafts=True,
            num_engines=num_engines,
        )
        for size in (2**11, 2**17)
    )
    of_row = 4 * (2**17 - 2**11) + search_bytes(2**17) - search_bytes(2**11)
    assert many - few == num_tokens * of_row
