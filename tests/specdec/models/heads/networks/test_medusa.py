# Modules: specdec.models.heads.formats.medusa, specdec.models.heads.networks.projection
"""Medusa heads in each layout against the equations of the paper."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from specdec.models.heads.config import HeadConfig, named_target
from tests.specdec.models.heads.driver import (
    HIDDEN,
    KERNELS,
    RANKS_AND_KERNELS,
    VOCAB,
    head_logits,
    save,
    selected_logits,
    sequences,
    weights,
)

NUM_HEADS, NUM_LAYERS = 3, 2


def medusa_weights(bias=True, vocab=VOCAB):
    """Return block weights and biases [head][layer] and output heads."""
    shapes = {}
    for head in range(NUM_HEADS):
        for layer in range(NUM_LAYERS):
            shapes[f"{head}.{layer}.weight"] = (HIDDEN, HIDDEN)
            shapes[f"{head}.{layer}.bias"] = (HIDDEN,)
        shapes[f"{head}.out"] = (vocab, HIDDEN)
    made = weights(shapes)
    if not bias:
        made |= {name: torch.zeros_like(made[name]) for name in made if name.endswith("bias")}
    return made


def reference(made, parts, outputs=None):
    """Return logits [B, NUM_HEADS, vocab] of the last hidden state of each sequence."""
    outputs = outputs or [made[f"{head}.out"] for head in range(NUM_HEADS)]
    x = torch.stack([part.hidden[-1] for part in parts])
    found = []
    for head in range(NUM_HEADS):
        y = x
        for layer in range(NUM_LAYERS):
            weight, bias = made[f"{head}.{layer}.weight"], made[f"{head}.{layer}.bias"]
            y = y + F.silu(y @ weight.T + bias)
        found.append(y @ outputs[head].T)
    return torch.stack(found, dim=1)


def original(made, prefix=""):
    """Return tensors as FasterDecoding names them, after `prefix`."""
    tensors = {}
    for name, tensor in made.items():
        head, middle, *kind = name.split(".")
        if middle == "out":
            tensors[f"{prefix}{head}.{NUM_LAYERS}.weight"] = tensor
        else:
            tensors[f"{prefix}{head}.{middle}.linear.{kind[0]}"] = tensor
    return tensors


def of_vllm(made, prefix="", bias=True):
    tensors = {}
    for name, tensor in made.items():
        head, middle, *kind = name.split(".")
        if middle == "out":
            tensors[f"{prefix}lm_heads.{head}.weight"] = tensor
        elif bias or kind[0] == "weight":
            tensors[f"{prefix}blocks.{head}.layers.{middle}.{kind[0]}"] = tensor
    return tensors


ORIGINAL = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "org/base"}
VLLM = {"model_type": "medusa", "num_heads": 3, "hidden_size": HIDDEN, "vocab_size": VOCAB}


@pytest.mark.parametrize(("size", "kernels"), RANKS_AND_KERNELS)
@pytest.mark.parametrize(
    ("config", "file", "rename"),
    [
        (ORIGINAL, "medusa_lm_head.pt", original),
        (None, "medusa_lm_head.pt", original),
        (ORIGINAL, "medusa_lm_head.safetensors", original),
        (VLLM, "model.safetensors", of_vllm),
        (VLLM, "pytorch_model.bin", lambda made: of_vllm(made, "medusa_heads.")),
        (VLLM, "model.safetensors", lambda made: original(made, "medusa_heads.")),
    ],
    ids=["original", "no-config", "safetensors", "vllm", "vllm-bin", "modelopt"],
)
def test_logits_equal_the_paper(tmp_path, target_dir, config, file, rename, size, kernels):
    made, parts = medusa_weights(), sequences()
    save(tmp_path, config, rename(made), file)
    found = head_logits(tmp_path, target_dir, parts, size=size, kernels=kernels)
    torch.testing.assert_close(found, reference(made, parts), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("has_target", [True, False])
def test_modelopt_beside_the_tensors_of_the_target(tmp_path, target_dir, target, has_target):
    made, parts = medusa_weights(), sequences()
    tensors = load_file(target_dir / "model.safetensors") if has_target else {}
    config = json.loads((target_dir / "config.json").read_text())
    config["medusa"] = {"num_medusa_heads": NUM_HEADS, "num_medusa_layers": NUM_LAYERS}
    save(tmp_path, config, tensors | original(made, "medusa_heads."))
    found = head_logits(tmp_path, target_dir, parts)
    torch.testing.assert_close(found, reference(made, parts), atol=1e-4, rtol=1e-4)
    description = HeadConfig.from_directory(tmp_path, target).describe()[0]
    assert description.startswith("taken for Medusa (ModelOpt): 3 heads of 2 layers")


def test_blocks_without_bias(tmp_path, target_dir):
    made, parts = medusa_weights(bias=False), sequences()
    save(tmp_path, VLLM, of_vllm(made, bias=False))
    found = head_logits(tmp_path, target_dir, parts)
    torch.testing.assert_close(found, reference(made, parts), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["lm_heads.0.weight", "lm_head.weight"])
def test_one_output_head_for_all(tmp_path, target_dir, name):
    made, parts = medusa_weights(), sequences()
    tensors = {k: v for k, v in of_vllm(made).items() if "lm_head" not in k}
    save(tmp_path, VLLM | {"original_lm_head": True}, tensors | {name: made["0.out"]})
    found = head_logits(tmp_path, target_dir, parts, size=2)
    expected = reference(made, parts, [made["0.out"]] * NUM_HEADS)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_output_head_of_the_target(tmp_path, target_dir):
    made, parts = medusa_weights(), sequences()
    tensors = {k: v for k, v in of_vllm(made).items() if "lm_head" not in k}
    save(tmp_path, VLLM | {"original_lm_head": True}, tensors)
    own = load_file(target_dir / "model.safetensors")["lm_head.weight"]
    found = head_logits(tmp_path, target_dir, parts, size=2)
    expected = reference(made, parts, [own] * NUM_HEADS)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stored", ["full", "selected"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_truncated_vocabulary(tmp_path, target_dir, target, stored, size, kernels):
    """A token map selects rows of full output heads, or names the rows of truncated ones."""
    made, parts = medusa_weights(), sequences()
    ids = torch.arange(5, VOCAB, 4)
    tensors = of_vllm(made) | {"token_map": ids}
    if stored == "selected":
        tensors = {k: v[ids] if "lm_head" in k else v for k, v in tensors.items()}
    save(tmp_path, VLLM | {"truncated_vocab_size": len(ids)}, tensors)
    config = HeadConfig.from_directory(tmp_path, target)
    assert config.draft_vocab_size == len(ids)
    found = head_logits(tmp_path, target_dir, parts, size=size, kernels=kernels)
    expected = reference(made, parts)[:, :, ids]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_draft_that_goes_on_for_one_sequence(tmp_path, target_dir):
    made, parts = medusa_weights(), sequences()
    save(tmp_path, VLLM, of_vllm(made))
    found = selected_logits(tmp_path, target_dir, parts)
    torch.testing.assert_close(found, reference(made, parts)[-1:], atol=1e-4, rtol=1e-4)


def test_sizes_and_description(tmp_path, target):
    made = medusa_weights()
    save(tmp_path, ORIGINAL, original(made), "medusa_lm_head.pt")
    config = HeadConfig.from_directory(tmp_path, target)
    assert (config.method, config.max_draft_tokens) == ("medusa", NUM_HEADS)
    assert (config.taps, config.feature_size, config.num_kv_layers) == ((), HIDDEN, 0)
    assert config.kv_bytes_per_token("float32") == 0
    assert config.weight_bytes("float32") == 4 * sum(each.numel() for each in made.values())
    biases = NUM_HEADS * NUM_LAYERS * HIDDEN
    assert (
        config.weight_bytes("float32", "int8") == config.weight_bytes("float32") // 4 + 3 * biases
    )
    assert config.describe() == (
        "taken for Medusa (FasterDecoding): 3 heads of 2 layers, own output heads for 383 tokens",
    )
    assert config.target_name == named_target(tmp_path) == "org/base"
