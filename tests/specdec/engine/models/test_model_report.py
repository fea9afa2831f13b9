"""The report of a model: memory by rank as it is loaded, and the methods that fit."""

import json
import re
from dataclasses import replace

import pytest
import torch

from specdec.config.model_aliases import ShippedDrafter
from specdec.config.speculation.methods import METHODS
from specdec.engine.models.model_report import Fit, Precision, report_model
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.config.native_limits import native_fault
from specdec.models.loading import load_model
from specdec.types.errors import InvalidValueError
from tests.specdec.models.families import save_family

TORCH = Precision("float32", None, is_native=False)
FAMILIES = ["llama-tied", "gemma2", "starcoder2", "phi3", "olmo2", "qwen3-moe", "deepseek-v3"]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_memory_by_rank_is_that_of_the_loaded_matrices(tmp_path, family, size):
    save_family(tmp_path, family)
    report = report_model(tmp_path, TORCH, size)
    config = ModelConfig.from_directory(tmp_path)
    for rank, memory in enumerate(report.ranks):
        group = TensorParallelGroup(rank, size)
        model = load_model(
            tmp_path,
            config,
            group,
            dtype=torch.float32,
            max_model_len=64,
            block_size=4,
            kernels="torch",
        )
        matrices = [model.lm_head.matrix.weight]
        for layer in model.layers:
            matrices += [each.matrix.weight for each in linears_of(layer)]
            if config.latent is not None:
                expansion = layer.attention.expansion.in_torch
                matrices += [expansion.to_keys.weights, expansion.to_values.weights]
        num_elements = sum(each.numel() for each in matrices)
        if not config.tie_word_embeddings:
            num_elements += model.embed_tokens.weight.numel()
        assert memory.weight_bytes == 4 * num_elements
        cache = model.new_kv_cache(8)
        assert memory.kv_bytes_per_token == cache.numel() * 4 // 8


def linears_of(layer):
    found = [layer.attention.qkv_proj, layer.attention.o_proj]
    found += [each for each in (getattr(layer.attention, "query_up", None),) if each]
    shared = getattr(layer.mlp, "shared", None)
    for mlp in (*getattr(layer.mlp, "experts", [layer.mlp]), *([shared] if shared else [])):
        found += [mlp.gate_up_proj, mlp.down_proj]
    return found


def save_in_16_bits(directory, family):
    """Write a model whose configuration names bfloat16."""
    save_family(directory, family)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "bfloat16"}))


@pytest.mark.parametrize("family", ["llama-tied", "deepseek-v3"])
def test_16_bit_checkpoints_stay_in_16_bits_in_native_kernels(tmp_path, family):
    save_in_16_bits(tmp_path, family)
    full = report_model(tmp_path, TORCH, 1).ranks[0].weight_bytes
    native = Precision("float32", None, is_native=True)
    assert report_model(tmp_path, native, 1).ranks[0].weight_bytes == full // 2


def test_a_quantized_head_is_no_longer_the_embedding(tmp_path):
    save_in_16_bits(tmp_path, "llama-tied")
    full = report_model(tmp_path, TORCH, 1).ranks[0].weight_bytes
    quantized = Precision("float32", "int8", is_native=True)
    expected = full // 4 + 2 * 383 * 90
    assert report_model(tmp_path, quantized, 1).ranks[0].weight_bytes == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_every_method_has_a_reason(tmp_path, family):
    save_family(tmp_path, family)
    found = {each.method: each for each in report_model(tmp_path, TORCH, 1).methods}
    assert list(found) == list(METHODS)
    assert all(each.reason for each in found.values())
    assert found["suffix"].fit is Fit.READY
    assert found["eagle3"].fit is Fit.NEEDS_FILES
    assert found["mtp"].fit is Fit.NO
    can_be_trained = "makes none" not in found["eagle3"].reason
    assert can_be_trained == (family == "llama-tied")


@pytest.mark.parametrize(
    "family", ["nemotron-h", "falcon-h1", "kimi-linear", "jamba", "gemma4", "deepseek-v3.2"]
)
def test_the_report_is_in_words(tmp_path, family):
    """Why there is no native kernel, which methods fit a hybrid, and what its states cost."""
    save_family(tmp_path, family)
    report = report_model(tmp_path, TORCH, 1)
    fault = native_fault(report.config) or ""
    reasons = {each.method: each.reason for each in report.methods}
    lines = [fault, *reasons.values(), *report.checkpoint.notes]
    assert not any(re.search(r"[a-z]+=|[{<]|frozenset", line) for line in lines), lines
    fits = {each.method: each.fit for each in report.methods}
    assert {fits["ngram"], fits["draft_model"]} == {Fit.READY, Fit.NEEDS_FILES}
    assert fits["eagle3"] is Fit.NEEDS_FILES
    (memory,), recurrent = report.ranks, report.config.recurrent
    assert (memory.state_bytes > 0) == (memory.guess_bytes > 0) == (recurrent is not None)
    if recurrent is not None:
        assert fits["colocated_draft_model"] is Fit.NO
        assert "separate ranks (draft_model)" in reasons["colocated_draft_model"]
        assert memory.state_bytes == recurrent.state_bytes("float32")


def test_guesses_of_mamba_are_those_that_the_kernels_keep(tmp_path):
    save_family(tmp_path, "jamba")
    (on_torch,), (on_triton,) = (
        report_model(tmp_path, each, 1).ranks for each in (TORCH, replace(TORCH, is_triton=True))
    )
    recurrent = ModelConfig.from_directory(tmp_path).recurrent
    channels = recurrent.kind.num_channels
    assert on_triton.guess_bytes == 4 * len(recurrent.layers) * channels > on_torch.guess_bytes
    assert on_triton.state_bytes == on_torch.state_bytes


def test_a_drafter_of_the_alias_is_ready(tmp_path):
    save_family(tmp_path, "llama-tied")
    drafters = (
        ShippedDrafter("mine-eagle3", "eagle3", 5),
        ShippedDrafter("mine-suffix", "suffix", 6, has_weights=False),
    )
    report = report_model(tmp_path, TORCH, 1, drafters=drafters)
    found = {each.method: each for each in report.methods}
    assert (found["eagle3"].fit, found["draft_model"].fit) == (Fit.READY, Fit.NEEDS_FILES)
    assert found["eagle3"].reason == "mine-eagle3 comes with specdec"
    assert found["suffix"].reason == "it reads the text alone"


def test_more_ranks_than_heads_are_refused(tmp_path):
    save_family(tmp_path, "llama-tied")
    with pytest.raises(InvalidValueError, match="tensor_parallel_size"):
        report_model(tmp_path, TORCH, 10)


def test_weights_that_stay_as_stored_are_counted_so(tmp_path):
    save_family(tmp_path, "llama-tied")
    path, stored = tmp_path / "config.json", {"quant_method": "awq", "bits": 4, "group_size": 128}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": stored}))
    dense = report_model(tmp_path, TORCH, 1).ranks[0].weight_bytes
    kept = replace(TORCH, is_triton=True)
    vocabulary = 4 * 383 * 90
    linear = (dense - vocabulary) // 4
    assert report_model(tmp_path, kept, 1).ranks[0].weight_bytes == (
        int(linear * (4 + 40 / 128) / 8) + vocabulary
    )


def test_8_bit_keys_and_values_are_counted_so(tmp_path):
    save_family(tmp_path, "llama-tied")
    wide, narrow = (
        report_model(tmp_path, replace(TORCH, kv_cache_dtype=kind), 1).ranks[0].kv_bytes_per_token
        for kind in ("auto", "fp8")
    )
    assert wide == 4 * narrow
