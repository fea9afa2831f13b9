# Modules: specdec.models.heads.formats.mlp_speculator
"""MLP speculators against the equations of the paper."""

import math

import pytest
import torch
import torch.nn.functional as F

from specdec.models.heads.config import HeadConfig
from tests.specdec.models.heads.driver import (
    HIDDEN,
    RANKS_AND_KERNELS,
    VOCAB,
    head_logits,
    save,
    selected_logits,
    sequences,
    weights,
)

NUM_HEADS = 3


def config_of(inner, tied, scaled):
    return {
        "model_type": "mlp_speculator",
        "vocab_size": VOCAB,
        "emb_dim": HIDDEN,
        "inner_dim": inner,
        "n_predict": NUM_HEADS,
        "tie_weights": tied,
        "scale_input": scaled,
    }


def speculator_weights(inner, tied):
    """Return tensors for every head, equal ones where they are tied."""
    inner = inner or HIDDEN
    shapes = {}
    for i in range(NUM_HEADS):
        shapes[f"emb.{i}.weight"] = shapes[f"head.{i}.weight"] = (VOCAB, inner)
        shapes[f"proj.{i}.weight"] = (inner, inner if i else HIDDEN)
        shapes[f"ln.{i}.weight"] = shapes[f"ln.{i}.bias"] = (inner,)
    made = weights(shapes)
    if tied:
        for name in made:
            kind, i, end = name.split(".")
            source = 0 if kind != "proj" else min(int(i), 1)
            made[name] = made[f"{kind}.{source}.{end}"].clone()
    return made


def reference(made, parts, scaled):
    """Return logits [B, NUM_HEADS, VOCAB]."""
    return torch.stack([reference_of(made, part, scaled) for part in parts])


def reference_of(made, part, scaled):
    state = part.hidden[-1]
    if scaled:
        state = state / (state.pow(2).mean() + 1e-6).sqrt() / math.sqrt(2)
    inner = len(made["ln.0.bias"])
    weight_s = 0.5 ** (0.5 / NUM_HEADS)
    weight_e = math.sqrt((1 - weight_s**2) * inner / 2)
    logits = []
    for i, token in enumerate([part.tokens[-1], *part.drafts][:NUM_HEADS]):
        state = made[f"proj.{i}.weight"] @ state
        state = state + weight_e / weight_s * made[f"emb.{i}.weight"][token]
        state = state / (state.pow(2).mean() + 1e-6).sqrt()
        state = F.gelu(state * made[f"ln.{i}.weight"] + made[f"ln.{i}.bias"])
        logits.append(made[f"head.{i}.weight"] @ state)
    return torch.stack(logits)


@pytest.mark.parametrize(("size", "kernels"), RANKS_AND_KERNELS)
@pytest.mark.parametrize(
    ("inner", "tied", "scaled", "file"),
    [
        (32, False, False, "model.safetensors"),
        (0, False, True, "pytorch_model.bin"),
        (32, True, True, "model.safetensors"),
        (0, True, False, "model.safetensors"),
    ],
)
def test_logits_equal_the_paper(tmp_path, target_dir, inner, tied, scaled, file, size, kernels):
    made, parts = speculator_weights(inner, tied), sequences()
    tensors = {f"speculator.{name}": tensor for name, tensor in made.items()}
    save(tmp_path, config_of(inner, tied, scaled), tensors, file)
    found = head_logits(tmp_path, target_dir, parts, size=size, kernels=kernels)
    torch.testing.assert_close(found, reference(made, parts, scaled), atol=1e-4, rtol=1e-4)


def test_a_draft_that_goes_on_for_one_sequence(tmp_path, target_dir):
    made, parts = speculator_weights(32, False), sequences()
    tensors = {f"speculator.{name}": tensor for name, tensor in made.items()}
    save(tmp_path, config_of(32, False, False), tensors)
    found = selected_logits(tmp_path, target_dir, parts)
    torch.testing.assert_close(found, reference(made, parts, False)[-1:], atol=1e-4, rtol=1e-4)


def test_tied_weights_that_are_stored_once(tmp_path, target_dir, target):
    made, parts = speculator_weights(32, True), sequences()
    once = {
        f"speculator.{name}": tensor
        for name, tensor in made.items()
        if int(name.split(".")[1]) <= name.startswith("proj")
    }
    save(tmp_path, config_of(32, True, False), once)
    found = head_logits(tmp_path, target_dir, parts)
    torch.testing.assert_close(found, reference(made, parts, False), atol=1e-4, rtol=1e-4)
    config = HeadConfig.from_directory(tmp_path, target)
    assert config.weight_bytes("float32") == 4 * sum(each.numel() for each in once.values())
    assert config.describe() == ("taken for MLP speculator: 3 heads of width 32, tied weights",)
