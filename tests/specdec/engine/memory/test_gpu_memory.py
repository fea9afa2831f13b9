# Modules: specdec.config.gpu.attention_splits, specdec.engine.memory.weight_memory
# Modules: specdec.models.config.stored_weights
"""Division of the memory of GPUs, with a rank on each, or with both models on one."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from specdec.config import llm
from specdec.config.gpu.attention_splits import ENOUGH_PROGRAMS, SEGMENT_TOKENS, heads_per_program
from specdec.config.llm import LLMConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.memory.gpu_workspace import attention_bytes, gpu_workspace_bytes
from specdec.engine.memory.memory_plan import memory_plan
from specdec.engine.memory.weight_memory import weight_bytes
from specdec.engine.models.model_resolution import Models
from specdec.kernels.triton.attention_plan import Tiles, TileShape, ValueSize
from specdec.models.config.model_config import ModelConfig
from specdec.models.config.stored_weights import stored_weights
from specdec.types.errors import OutOfMemoryError
from tests.specdec.engine.memory.test_memory_plan import kv_bytes

GIB = 2**30


@pytest.fixture
def model(tiny_model_dir):
    return ModelConfig.from_directory(tiny_model_dir)


FP8 = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
INT4 = {"format": "pack-quantized", "weights": {"num_bits": 4, "group_size": 32}}
FLOAT8 = {"format": "float-quantized", "weights": {"num_bits": 8, "type": "float"}}
NVFP4 = {"format": "nvfp4-pack-quantized", "weights": {"num_bits": 4, "group_size": 16}}
ATTENTION = {"targets": ["LlamaAttention"], "weights": None}
REORDERED = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}


def compressed(*groups):
    described = {f"group_{index}": group for index, group in enumerate(groups)}
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": described,
    }


@pytest.mark.parametrize(
    ("stored", "num_ranks", "bits"),
    [
        (AWQ, 1, 4 + 40 / 128),
        (AWQ, 2, 4 + 40 / 128),
        (FP8, 1, 8 + 40 / 128),
        (REORDERED, 1, 4 + 40 / 128),
        (REORDERED, 2, 16),
        (FP8 | {"ignored_layers": ["gate", "e_score_correction_bias"]}, 1, 8 + 40 / 128),
        (FP8 | {"ignored_layers": ["re:.*mlp.gate$"]}, 1, 8 + 40 / 128),
        (FP8 | {"ignored_layers": ["model.layers.0.mlp.gate_proj"]}, 1, 16),
        (FP8 | {"ignored_layers": ["model.layers.0.mlp.down_proj"]}, 1, 16),
        ({"quant_method": "gptq", "bits": 8}, 1, 16),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 1, 16),
        (compressed(INT4, ATTENTION), 1, 4 + 40 / 32),
        (compressed(INT4, FLOAT8), 1, 8 + 40 / 128),
        (compressed(FLOAT8, NVFP4), 1, 16),
    ],
)
def test_stored_weights_of_gpus_are_counted_as_they_are(
    model, monkeypatch, stored, num_ranks, bits
):
    """Those that ranks would have to reorder, and layouts without a kernel, in 16 bits."""
    quantized = dataclasses.replace(model, stored_weights=stored_weights(stored))
    embeddings = model.vocab_size * model.hidden_size
    linear = model._num_matrix_elements - embeddings
    expected = int(linear * bits / 8) + 2 * (model.num_parameters - linear)
    monkeypatch.setattr(llm, "has_triton_package", lambda: True)
    config = dataclasses.replace(on_gpus(), dtype="bfloat16")
    assert weight_bytes(config, quantized, num_ranks) == expected
    plain = dataclasses.replace(config, kernels="torch")
    assert weight_bytes(plain, quantized, num_ranks) == model.weight_bytes("bfloat16")


@pytest.mark.parametrize(("method", "bits"), [("int8", 8), ("int4", 4.25)])
def test_quantized_drafts_of_gpus_are_counted(model, method, bits):
    config = on_gpus(quantization=method)
    matrices, vocabulary = model._num_matrix_elements, model.vocab_size * model.hidden_size
    table = vocabulary if model.tie_word_embeddings else 0
    rest = model.num_parameters - matrices + table
    assert weight_bytes(config, model, 1, method) == int(matrices * bits / 8) + 4 * rest


def on_gpus(**speculation):
    return LLMConfig(
        model="tiny",
        device="cuda",
        dtype="float32",
        max_num_seqs=4096,
        max_num_batched_tokens=4096,
        speculative_config=SpeculativeConfig.of("draft_model", **speculation),
    )


def test_each_pool_is_bounded_by_the_gpus_of_its_model(model):
    big = dataclasses.replace(model, intermediate_size=20_000)
    config, available = on_gpus(draft_tensor_parallel_size=2), 3.5 * GIB
    alone = memory_plan(config, Models(model), available).engine.num_blocks
    both = memory_plan(config, Models(model, big), available)
    assert both.engine.num_blocks == alone > 0
    # Each of two GPUs has two of three KV heads, the middle one on both; one has five of nine query
    # heads. Each has a workspace, with the buffers of NCCL.
    workspace = gpu_workspace_bytes(config, big, drafts=True)
    free = (available - workspace) - big.weight_bytes("float32") * 5 / 9
    held = kv_bytes(big, both.draft, 2) / 2
    assert 0.99 * free < held <= free


def test_a_draft_pool_on_a_gpu_is_no_larger_than_it_can_fill(model):
    plan = memory_plan(on_gpus(max_model_len=64), Models(model, model), 3 * GIB)
    assert plan.draft.num_blocks == 4096 * 4
    assert plan.engine.num_blocks > plan.draft.num_blocks


def test_a_configured_size_on_gpus_includes_both_models(model):
    config = dataclasses.replace(on_gpus(), kv_cache_memory_gib=0.25)
    plan = memory_plan(config, Models(model, model), 16 * GIB)
    total = kv_bytes(model, plan.engine) + kv_bytes(model, plan.draft)
    assert 0.99 * GIB / 4 < total <= GIB / 4


def test_a_gpu_that_is_too_small_raises_an_error_with_the_fix(model):
    message = r"a rank of the target .* leave 0\.0 for the KV cache.*: raise tensor_parallel_size"
    with pytest.raises(OutOfMemoryError, match=message):
        memory_plan(on_gpus(), Models(model), 1.5 * GIB)
    huge = dataclasses.replace(model, intermediate_size=2_000_000)
    message = "a rank of the draft model .*: raise speculative_config.draft_tensor_parallel_size"
    with pytest.raises(OutOfMemoryError, match=message):
        memory_plan(on_gpus(), Models(model, huge), 3 * GIB)


@pytest.mark.parametrize("in_process", [True, False])
def test_models_that_share_a_gpu_have_one_plan(model, in_process):
    """In one process they always do."""
    config = on_gpus(share_gpu=None if in_process else True)
    available = 5 * GIB
    plan = memory_plan(config, Models(model, model), available, in_process=in_process)
    held = kv_bytes(model, plan.engine) + kv_bytes(model, plan.draft)
    without_kv = sum(
        model.weight_bytes("float32") + gpu_workspace_bytes(config, model, drafts=drafts)
        for drafts in (True, False)
    )
    assert 0.99 * (available - without_kv) < held <= available - without_kv
    assert plan.draft.num_blocks == plan.engine.num_blocks
    apart = memory_plan(config if in_process else on_gpus(), Models(model, model), available)
    assert apart.engine.num_blocks > plan.engine.num_blocks


def test_a_shared_gpu_that_is_too_small_raises_an_error(model):
    message = "of the GPU that they share; weights and workspaces leave 0.00 for both KV caches"
    with pytest.raises(OutOfMemoryError, match=message):
        memory_plan(on_gpus(share_gpu=True), Models(model, model), 2 * GIB)


def test_a_configured_size_on_a_shared_gpu_includes_both_models(model):
    config = dataclasses.replace(on_gpus(share_gpu=True), kv_cache_memory_gib=0.25)
    plan = memory_plan(config, Models(model, model), 16 * GIB)
    total = kv_bytes(model, plan.engine) + kv_bytes(model, plan.draft)
    assert 0.99 * GIB / 4 < total <= GIB / 4


@pytest.mark.parametrize(
    ("changes", "model_changes"),
    [
        ({"max_num_batched_tokens": 8192}, {}),
        ({"max_num_seqs": 4096}, {}),
        ({}, {"intermediate_size": 4096}),
        ({}, {"vocab_size": 100_000}),
        ({}, {"max_position_embeddings": 2048}),
        ({"enforce_eager": False}, {}),
    ],
    ids=str,
)
def test_a_workspace_grows_with_the_largest_step(model, changes, model_changes):
    small = LLMConfig(
        model="tiny",
        device="cuda",
        dtype="bfloat16",
        max_num_seqs=16,
        max_num_batched_tokens=4096,
        enforce_eager=True,
        speculative_config=SpeculativeConfig.of("ngram"),
    )
    large = dataclasses.replace(small, **changes)
    assert gpu_workspace_bytes(small, model, drafts=False) < gpu_workspace_bytes(
        large, dataclasses.replace(model, **model_changes), drafts=False
    )


@pytest.mark.parametrize("max_model_len", [200, 4096, 131072])
@pytest.mark.parametrize(("num_heads", "kv_heads"), [(4, 4), (32, 8), (20, 4), (80, 1)])
@pytest.mark.parametrize("latent_rank", [None, 128])
def test_the_memory_plan_counts_the_parts_of_a_split_context(
    max_model_len, num_heads, kv_heads, latent_rank
):
    """The largest allocation of a plan, of all numbers of tiles, is what is reserved.

    With latents the heads are divided among programs, whose number is that of KV heads.
    """
    if latent_rank is not None:
        kv_heads = -(-num_heads // heads_per_program(num_heads))
    model = SimpleNamespace(
        num_heads=num_heads,
        num_kv_heads=kv_heads if latent_rank is None else 1,
        head_dim=128 if latent_rank is None else 192,
        latent=latent_rank and SimpleNamespace(rank=latent_rank),
        max_position_embeddings=131072,
        sliding_windows=(None, 1024, None),
    )
    config = LLMConfig(model="m", device="cuda", dtype="bfloat16", max_model_len=max_model_len)
    group = num_heads // kv_heads
    largest = 0
    for query_len in (1, 2, 8, 16):
        values = ValueSize(128, 2)
        shape = TileShape.of([query_len], max_model_len, group, values, invariant=False)
        for num_tiles in range(1, 4 * ENOUGH_PROGRAMS + 1):
            tiles = torch.empty(num_tiles, dtype=torch.int32, device="meta")
            parts = Tiles.allocate(tiles, tiles, shape, kv_heads, 128).parts
            largest = max(largest, sum(part.nbytes for part in parts or ()))
    windows = 2
    reserved = attention_bytes(config, model)
    assert windows * largest <= reserved <= 1.1 * windows * largest
    assert (reserved > 0) == (max_model_len > SEGMENT_TOKENS)


def test_the_draft_may_have_a_smaller_gpu(model):
    config = on_gpus(max_model_len=256)
    same = memory_plan(config, Models(model, model), 3 * GIB)
    smaller = memory_plan(config, Models(model, model), 3 * GIB, draft_bytes=int(1.9 * GIB))
    assert smaller.engine == same.engine
    assert smaller.draft.num_blocks < same.draft.num_blocks
