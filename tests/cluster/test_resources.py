import dataclasses

import pytest
import torch

from cluster.config import ServeConfig
from cluster.resources import check_tensor_parallel_size, engine_config, threads_per_shard
from specdec.config import ModelConfig
from specdec.errors import InvalidValueError, OutOfMemoryError

GIB = 2**30


@pytest.fixture
def model(tiny_model_dir):
    return ModelConfig.from_directory(tiny_model_dir)


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
        ({"kv_cache_memory_gib": 50.0}, 8 * GIB, "need 50.7 GiB, and 8.0 GiB are free"),
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
    check_tensor_parallel_size(size, model, num_cpus)


@pytest.mark.parametrize(
    ("size", "num_cpus", "limit"), [(4, 2, 3), (10, 64, 9)], ids=["machine", "heads"]
)
def test_a_size_beyond_the_machine_or_the_model_is_refused(model, size, num_cpus, limit):
    message = f"tensor_parallel_size is {size}; it must be from 1 to {limit}"
    with pytest.raises(InvalidValueError, match=message):
        check_tensor_parallel_size(size, model, num_cpus)


def test_ranks_share_the_cores(monkeypatch):
    monkeypatch.setattr("cluster.resources.available_cpus", lambda: 8)
    assert [threads_per_shard(size) for size in (1, 2, 3, 16)] == [8, 4, 2, 1]


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
