# Modules: specdec.models.gguf.conversion, specdec.models.gguf.families
# Modules: specdec.models.gguf.gguf_model, specdec.models.gguf.tensors
"""Files of each family, converted: the same weights and configuration, or refused by name."""

import json
import shutil
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specdec.models.config.model_config import ModelConfig
from specdec.models.config.rope import Llama3Rope, LongRope
from specdec.models.gguf.conversion import convert
from specdec.models.gguf.families import FAMILIES
from specdec.models.layers.rotary import frequencies
from specdec.models.resolve import resolve
from specdec.types.errors import ModelNotFoundError, UnsupportedModelError
from tests.specdec.models.families import LLAMA3, LONG_ROPE, WINDOW, save_family
from tests.specdec.models.gguf.family_files import write_family

ROPE = {"rope_theta": 1000.0}
LLAMA3_ROPE = Llama3Rope(1000.0, 8.0, 1.0, 4.0, 32)
FACTORS = "rope_freqs.weight"
WINDOWS = {"sliding_window": WINDOW, "layer_types": None}


def nothing(writer):
    del writer


def theta(writer):
    writer.add_rope_freq_base(1000.0)


def linear(writer):
    writer.add_rope_freq_base(1000.0)
    writer.add_rope_scaling_factor(2.5)  # without a type, as in older files


def yarn(writer):
    writer.add_rope_freq_base(1000.0)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(32)


def partial_long(writer):
    writer.add_rope_freq_base(1000.0)
    writer.add_rope_dimension_count(12)
    writer.add_rope_scaling_attn_factors(1.1)
    writer.add_rope_scaling_orig_ctx_len(8)


def quarter(writer):
    writer.add_rope_freq_base(1000.0)
    writer.add_rope_dimension_count(4)


def gemma3_rope(writer):
    writer.add_rope_freq_base(5000.0)
    writer.add_float32("gemma3.rope.freq_base_swa", 300.0)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def llama3_factors():
    plain = 1 / 1000.0 ** (torch.arange(0, 16, 2) / 16)
    return (plain / frequencies(LLAMA3_ROPE, 16, 256)).numpy()


LONG = [
    (f"rope_factors_{kind}.weight", np.array(LONG_ROPE[f"{kind}_factor"], np.float32))
    for kind in ("short", "long")
]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
NO_BIAS = {"attention_bias": False}
CASES = {
    "llama": ("llama", "llama", {"rope_parameters": ROPE, "head_dim": 20}, theta),
    "llama-tied": ("llama-tied", "llama", {}, nothing),
    "llama-linear": ("llama-linear", "llama", {"rope_parameters": {
        **ROPE, "rope_type": "linear", "factor": 2.5}}, linear),
    "qwen2-yarn": ("qwen2", "qwen2", {"rope_parameters": {**ROPE, **YARN}}, yarn),
    "qwen3": ("qwen3-tied", "qwen3", {}, nothing),
    "qwen3moe": ("qwen3-moe", "qwen3moe", {
        **NO_BIAS, "use_sliding_window": False, "mlp_only_layers": []}, nothing),
    "phi3": ("phi3", "phi3", {}, partial_long),
    "gemma2": ("gemma2", "gemma2", {
        **NO_BIAS, **WINDOWS, "query_pre_attn_scalar": 16, "rope_parameters": ROPE}, theta),
    "gemma3": ("gemma3", "gemma3", {
        **NO_BIAS, **WINDOWS, "query_pre_attn_scalar": 16}, gemma3_rope),
    "stablelm": ("stablelm", "stablelm", {"rope_parameters": {
        **ROPE, "partial_rotary_factor": 0.25}}, quarter),
    "starcoder2": ("starcoder2", "starcoder2", {
        "sliding_window": None, "rope_parameters": ROPE}, theta),
}  # fmt: skip


@pytest.fixture
def save(tiny_model_dir, tmp_path):
    """Return a function that saves a model of a family with a tokenizer."""

    def saved(name, **changes):
        directory = tmp_path / "hf"
        save_family(directory, name, **changes)
        for file in tiny_model_dir.glob("*token*"):
            shutil.copy(file, directory)
        return directory

    return saved


def of_files(directory):
    """Return the configuration, less what a GGUF file does not have."""
    found = ModelConfig.from_directory(directory)
    exact = {"rms_norm_eps": 0.0, "eos_token_ids": frozenset()}
    return replace(found, **exact), found.rms_norm_eps


def test_all_families_have_a_case():
    assert {architecture for _, architecture, *_ in CASES.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", CASES)
def test_a_converted_file_is_the_original(save, tmp_path, name):
    family, architecture, changes, keys = CASES[name]
    directory = save(family, **changes)
    offset = 1.0 if architecture.startswith("gemma") else 0.0
    tensors = LONG if architecture == "phi3" else ()
    path = write_family(
        directory, tmp_path / "m.gguf", architecture, keys, tensors=tensors, norm_offset=offset
    )
    (tmp_path / "out").mkdir()
    convert(path, tmp_path / "out", splits_digits=False, dtype="float32")
    (found, epsilon), (wanted, original) = of_files(tmp_path / "out"), of_files(directory)
    assert epsilon == pytest.approx(original)
    if architecture == "phi3":
        assert found.rope.attention_factor == pytest.approx(wanted.rope.attention_factor)
        for kind in ("short_factors", "long_factors"):
            assert getattr(found.rope, kind) == pytest.approx(getattr(wanted.rope, kind))
        same = {"rope": wanted.rope, "layer_ropes": wanted.layer_ropes}
        found = replace(found, **same)
    assert found == wanted
    weights, originals = (
        load_file(each / "model.safetensors") for each in (tmp_path / "out", directory)
    )
    assert weights.keys() == originals.keys()
    for key, weight in originals.items():
        assert torch.allclose(weights[key], weight, atol=1e-6 if offset else 0.0), key


def llama_file(save, tmp_path, add_keys=nothing, tensors=(), **changes):
    directory = save("llama", **changes)
    return write_family(directory, tmp_path / "m.gguf", "llama", add_keys, tensors=tensors)


def converted(path, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    convert(path, out, splits_digits=False, dtype="float32")
    return out


def test_factors_of_rope_are_kept(save, tmp_path):
    path = llama_file(save, tmp_path, theta, [(FACTORS, llama3_factors())])
    rope = ModelConfig.from_directory(converted(path, tmp_path)).rope
    assert isinstance(rope, LongRope)
    wanted = frequencies(LLAMA3_ROPE, 16, 256)
    assert torch.allclose(frequencies(rope, 16, 256), wanted, rtol=1e-6)
    assert LLAMA3["factor"] == LLAMA3_ROPE.factor


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("llama.expert_count", 8, "expert_count"),
        ("llama.attention.scale", 0.5, "attention.scale"),
        ("llama.attention.value_length", 20, "value_length"),
        ("llama.rope.dimension_count", 8, "dimension_count"),
        ("llama.some_new_key", 1, "llama.some_new_key"),
        ("tokenizer.ggml.some_new_key", 1, "some_new_key"),
        ("tokenizer.ggml.pre", "unheard-of", "tokenizer.ggml.pre"),
        ("tokenizer.ggml.model", "rwkv", "tokenizer.ggml.model"),
        ("llama.rope.scaling.attn_factor", 2.0, "attn_factor"),
        ("llama.rope.scaling.factor", float("inf"), "rope.scaling.factor"),
        ("llama.rope.scaling.type", 3, "rope.scaling.type"),
        ("tokenizer.ggml.eot_token_id", "x", "it must be int"),
    ],
)
def test_keys_that_are_not_understood_are_refused(save, tmp_path, key, value, named):
    def add(writer):
        {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](
            key, value
        )

    directory = save("llama")
    path = tmp_path / "m.gguf"
    write_family(directory, path, "llama", nothing, last_keys=add)
    with pytest.raises(ModelNotFoundError, match=named):
        resolve(str(path), tmp_path / "cache", lambda line: None)
    assert [each.suffix for each in (tmp_path / "cache" / "gguf").iterdir()] == [".lock"]


def test_a_key_of_other_tasks_is_ignored(save, tmp_path):
    key = "tokenizer.ggml.add_sep_token"
    path = llama_file(save, tmp_path, lambda writer: writer.add_bool(key, False))
    assert (converted(path, tmp_path) / "tokenizer.json").is_file()


def test_keys_at_zero_are_ignored(save, tmp_path):
    path = llama_file(save, tmp_path, lambda writer: writer.add_expert_count(0))
    assert ModelConfig.from_directory(converted(path, tmp_path)).experts is None


@pytest.mark.parametrize("normalizes", [True, False])
def test_a_key_that_is_false_is_kept(save, tmp_path, normalizes):
    directory = save("qwen3-moe", **CASES["qwen3moe"][2], norm_topk_prob=normalizes)

    def add(writer):
        writer.add_expert_weights_norm(normalizes)

    path = write_family(directory, tmp_path / "m.gguf", "qwen3moe", add)
    experts = ModelConfig.from_directory(converted(path, tmp_path)).experts
    assert experts.normalizes is normalizes


@pytest.mark.parametrize("name", ["blk.1.ffn_up.weight", "output_norm.weight", "token_embd.weight"])
def test_a_missing_tensor_is_named_and_nothing_is_cached(save, tmp_path, name):
    directory = save("llama")
    path = write_family(directory, tmp_path / "m.gguf", "llama", nothing, leave_out=(name,))
    for _ in range(2):
        with pytest.raises(ModelNotFoundError, match=f"lacks {name}"):
            resolve(str(path), tmp_path / "cache", lambda line: None)
    assert [each.suffix for each in (tmp_path / "cache" / "gguf").iterdir()] == [".lock"]


def test_a_tensor_that_nothing_reads_is_named(save, tmp_path):
    extra = [("blk.0.attn_q.bias", np.ones(144, np.float32))]
    with pytest.raises(UnsupportedModelError, match=r"not understood: blk\.0\.attn_q\.bias"):
        converted(llama_file(save, tmp_path, tensors=extra), tmp_path)


def test_another_architecture_is_refused(save, tmp_path):
    path = llama_file(save, tmp_path)
    path.write_bytes(path.read_bytes().replace(b"llama", b"mamba"))
    with pytest.raises(UnsupportedModelError, match="architecture 'mamba' is not supported"):
        converted(path, tmp_path)


def test_end_tokens_are_those_of_all_keys_and_of_names(save, tmp_path):
    def add(writer):
        writer.add_eot_token_id(7)
        writer.add_eom_token_id(8)

    directory = converted(llama_file(save, tmp_path, add), tmp_path)
    assert ModelConfig.from_directory(directory).eos_token_ids == {0, 2, 7, 8}
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 7, 8, 0]


@pytest.mark.parametrize("kind", [gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED])
def test_tokens_end_a_text_by_their_name(save, tmp_path, kind):
    """The tokenizer has <|endoftext|> as 0, <|im_end|> as 2; a key names another end of a text."""

    def change(writer):
        writer.add_eos_token_id(1)
        for token_id in (0, 2):
            writer.kv_data[0]["tokenizer.ggml.token_type"].value[token_id] = kind

    directory = save("llama")
    path = tmp_path / "m.gguf"
    write_family(directory, path, "llama", nothing, last_keys=change)
    assert ModelConfig.from_directory(converted(path, tmp_path)).eos_token_ids == {0, 1, 2}
