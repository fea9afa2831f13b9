import dataclasses

import pytest
import torch

from cluster.config import ServeConfig
from cluster.resources import (
    CPUS_PER_SHARD,
    Models,
    check_ranks,
    memory_per_replica,
    memory_plan,
    placement_bundles,
    threads_per_shard,
)
from specdec.config import EngineConfig
from specdec.errors import InvalidValueError, OutOfMemoryError
from specdec.model_config import ModelConfig
from specdec.speculative_config import SpeculativeConfig

GIB = 2**30


@pytest.fixture
def model(tiny_model_dir):
    return ModelConfig.from_directory(tiny_model_dir)


def engine_config(config: ServeConfig, model: ModelConfig, available: int) -> EngineConfig:
    return memory_plan(config, Models(model), available).engine


def test_the_kv_pool_takes_a_share_of_free_memory(model):
    sized = [
        engine_config(ServeConfig(max_num_seqs=256), model, available).num_blocks
        for available in (GIB, 2 * GIB)
    ]
    assert 0 < sized[0] < sized[1]


def test_the_kv_pool_is_no_larger_than_could_be_used(model):
    config = engine_config(ServeConfig(max_num_seqs=2, max_model_len=64), model, 1000 * GIB)
    assert config.num_blocks == 2 * 64 // 16


def test_a_configured_pool_is_taken_as_it_is(model):
    config = ServeConfig(kv_cache_memory_gib=0.25)
    block_bytes = 16 * 2 * 2 * 3 * 16 * 4
    assert engine_config(config, model, 8 * GIB).num_blocks == GIB // 4 // block_bytes


@pytest.mark.parametrize(
    ("changes", "available", "message"),
    [
        ({}, GIB // 8, "GiB are free"),
        ({"kv_cache_memory_gib": 50.0}, 8 * GIB, "need 50.8 GiB, and 8.0 GiB are free"),
        ({"kv_cache_memory_gib": 0.0001}, 8 * GIB, "have 0.1 MiB; one sequence .* needs 0.4"),
    ],
)
def test_too_little_memory_is_told(model, changes, available, message):
    with pytest.raises(OutOfMemoryError, match=message):
        engine_config(ServeConfig(**changes), model, available)


def test_a_context_beyond_the_models_is_refused(model):
    with pytest.raises(InvalidValueError, match="max_model_len is 513; it must be from 2 to 512"):
        engine_config(ServeConfig(max_model_len=513), model, 8 * GIB)


@pytest.mark.parametrize(("size", "num_cpus"), [(3, 2), (1, 1), (9, 64)])
def test_sizes_that_a_machine_bears(model, size, num_cpus):
    check_ranks(ServeConfig(tensor_parallel_size=size), Models(model), num_cpus)


@pytest.mark.parametrize(
    ("size", "num_cpus", "limit"), [(5, 2, 4), (10, 64, 9)], ids=["machine", "heads"]
)
def test_a_size_beyond_the_machine_or_the_model_is_refused(model, size, num_cpus, limit):
    message = f"tensor_parallel_size is {size}; it must be from 1 to {limit}"
    with pytest.raises(InvalidValueError, match=message):
        check_ranks(ServeConfig(tensor_parallel_size=size), Models(model), num_cpus)


def test_ranks_share_the_cores(monkeypatch):
    monkeypatch.setattr("cluster.resources.available_cpus", lambda: 8)
    assert [threads_per_shard(size) for size in (1, 2, 3, 16)] == [8, 4, 2, 1]
    assert [threads_per_shard(2, replicas) for replicas in (1, 2, 3)] == [4, 2, 1]


def test_replicas_share_the_memory(monkeypatch):
    monkeypatch.setattr("cluster.resources.available_memory_bytes", lambda: 12 * GIB)
    assert memory_per_replica(ServeConfig()) == 12 * GIB
    assert memory_per_replica(ServeConfig(ingress="serve", max_replicas=3)) == 4 * GIB


def test_two_replicas_fit_two_cores_each_with_a_draft(model):
    speculation = SpeculativeConfig("draft_model")
    config = ServeConfig(ingress="serve", num_replicas=2, speculative_config=speculation)
    check_ranks(config, Models(model, model), 2)


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        ({"num_replicas": 4}, "num_replicas is 4; it must be from 1 to 3, as many as"),
        ({"max_replicas": 9}, "max_replicas is 9; it must be from 1 to 3, as many as"),
    ],
)
def test_more_replicas_than_the_machine_bears_are_refused(model, replicas, message):
    with pytest.raises(InvalidValueError, match=message):
        check_ranks(ServeConfig(model="tiny", ingress="serve", **replicas), Models(model), 2)


def test_a_replica_that_never_fits_is_told_by_its_ranks(model):
    config = ServeConfig(ingress="serve", tensor_parallel_size=9)
    with pytest.raises(InvalidValueError, match="tensor_parallel_size is 9"):
        check_ranks(config, Models(model), 2)


@pytest.mark.parametrize("tied", [True, False])
def test_quantized_weights_are_counted_as_such(model, tied):
    model = dataclasses.replace(model, tie_word_embeddings=tied)
    attention, mlp, head = (9 + 3 + 3 + 9) * 16 * 144, 3 * 144 * 200, 383 * 144
    norms = (2 * 2 + 1) * 144
    matrices = 2 * (attention + mlp) + head
    assert model.weight_bytes(torch.float32, "int8") == matrices + 4 * (head + norms)
    full = matrices + norms + (0 if tied else head)
    assert model.weight_bytes(torch.bfloat16) == 2 * full


def test_quantized_weights_leave_more(model):
    config = ServeConfig(max_num_seqs=4096, max_num_batched_tokens=4096)
    quantized = engine_config(dataclasses.replace(config, quantization="int8"), model, GIB)
    assert quantized.num_blocks > engine_config(config, model, GIB).num_blocks


def test_weights_of_a_wider_type_leave_less(model):
    config = ServeConfig(max_num_seqs=4096, max_num_batched_tokens=4096)
    narrow = engine_config(dataclasses.replace(config, dtype="bfloat16"), model, GIB)
    assert narrow.num_blocks > engine_config(config, model, GIB).num_blocks


@pytest.fixture
def drafting():
    speculation = SpeculativeConfig("draft_model", draft_tensor_parallel_size=2, max_model_len=100)
    return ServeConfig(speculative_config=speculation)


def test_target_and_draft_share_the_memory_block_for_block(model, drafting):
    drafting = dataclasses.replace(drafting, kv_cache_memory_gib=0.01)
    alone = memory_plan(drafting, Models(model), 4 * GIB)
    both = memory_plan(drafting, Models(model, model), 4 * GIB)
    assert alone.draft is None
    assert both.draft.num_blocks == both.engine.num_blocks < alone.engine.num_blocks
    assert both.draft.max_model_len == 100


def test_the_draft_model_is_told_when_to_end_a_draft(model):
    speculation = SpeculativeConfig("draft_model", draft_confidence_threshold=0.4)
    config = ServeConfig(speculative_config=speculation)
    plan = memory_plan(config, Models(model, model), 4 * GIB)
    assert plan.draft.confidence_threshold == 0.4


def test_what_lookups_keep_is_left_free(model):
    def num_blocks(**keys):
        speculation = SpeculativeConfig(**keys)
        config = ServeConfig(
            max_num_seqs=4096, max_num_batched_tokens=4096, speculative_config=speculation
        )
        return engine_config(config, model, GIB).num_blocks

    assert num_blocks(method="suffix") < num_blocks(method="ngram")
    off = {"method": "suffix", "suffix_decoding_max_cached_requests": 0}
    assert num_blocks(**off) == num_blocks(method="ngram")
    pooled = [num_blocks(method="lookahead", lookahead_pool_size=size) for size in (10, 200)]
    assert pooled[1] < pooled[0] <= num_blocks(method="ngram")


def test_each_model_has_a_bundle_of_its_own(drafting):
    assert placement_bundles(drafting) == [{"CPU": 0.2}, {"CPU": 0.35}, {"CPU": 0.7}]
    assert len(placement_bundles(ServeConfig(speculative_config=None))) == 2


def test_a_bundle_holds_its_ranks_as_ray_counts():
    for size in range(1, 65):
        bundle = placement_bundles(ServeConfig(model="tiny", tensor_parallel_size=size))[1]
        assert int(bundle["CPU"] * 10_000) >= size * int(CPUS_PER_SHARD * 10_000)


def test_draft_ranks_count_too(model, drafting):
    check_ranks(drafting, Models(model, model), 2)
    with pytest.raises(InvalidValueError, match=r"draft_tensor_parallel_size is 2; .* from 1 to 1"):
        check_ranks(drafting, Models(model, model), 1)


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs with 16 and 24 GiB free, as torch would tell of them."""
    sizes = [16 * GIB, 24 * GIB]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(sizes))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda index: (sizes[index], 80 * GIB))


@pytest.mark.usefixtures("gpus")
def test_on_gpus_each_rank_has_one_of_its_own(drafting):
    config = dataclasses.replace(drafting, device="cuda", tensor_parallel_size=2)
    assert placement_bundles(config) == [
        {"CPU": 0.2},
        {"CPU": 0.7, "GPU": 2.0},
        {"CPU": 0.7, "GPU": 2.0},
    ]
    assert memory_per_replica(config) == int(16 * GIB * 0.9)


@pytest.mark.usefixtures("gpus")
def test_the_fullest_gpu_decides_for_all(model):
    config = ServeConfig(
        model="tiny", device="cuda", max_num_seqs=4096, max_num_batched_tokens=4096
    )
    alone = memory_plan(config, Models(model), 3 * GIB).engine.num_blocks
    big = dataclasses.replace(model, intermediate_size=200_000)
    both = memory_plan(config, Models(model, big), 3 * GIB).engine.num_blocks
    assert 0 < both < alone
    with pytest.raises(OutOfMemoryError, match=r"leave 0\.0 for the KV cache"):
        memory_plan(config, Models(model), 2 * GIB)


@pytest.mark.usefixtures("gpus")
def test_more_ranks_than_gpus_are_refused(model, drafting):
    config = dataclasses.replace(drafting, device="cuda", tensor_parallel_size=1)
    with pytest.raises(InvalidValueError, match="3 are needed, 2 are here"):
        check_ranks(config, Models(model, model), 64)
    check_ranks(dataclasses.replace(config, speculative_config=None), Models(model), 64)


def test_a_gpu_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InvalidValueError, match="device is 'cuda'; it must be cpu"):
        memory_per_replica(ServeConfig(model="tiny", device="cuda"))
