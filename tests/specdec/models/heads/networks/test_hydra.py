# Modules: specdec.models.heads.formats.hydra
"""Hydra heads against the equations of the paper."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

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

NUM_HEADS, NUM_LAYERS = 3, 2
CONFIG = {"hydra_num_heads": NUM_HEADS, "hydra_num_layers": 2, "hydra_head_arch": "mlp"}


def hydra_weights():
    """Return tensors as the authors store them."""
    shapes = {}
    for i in range(NUM_HEADS):
        for j in range(NUM_LAYERS):
            width = HIDDEN if j else (i + 2) * HIDDEN
            for name in ("linear",) if j else ("linear", "res_connection"):
                shapes[f"hydra_mlp.{i}.{j}.{name}.weight"] = (HIDDEN, width)
                shapes[f"hydra_mlp.{i}.{j}.{name}.bias"] = (HIDDEN,)
        shapes[f"hydra_lm_head.{i}.weight"] = (VOCAB, HIDDEN)
        shapes[f"hydra_lm_head.{i}.bias"] = (VOCAB,)
    return weights(shapes)


def reference(made, parts, target_dir):
    embedding = load_file(target_dir / "model.safetensors")["model.embed_tokens.weight"]

    def linear(x, name):
        return made[f"{name}.weight"] @ x + made[f"{name}.bias"]

    found = []
    for part in parts:
        x, logits = part.hidden[-1], []
        for i, token in enumerate([part.tokens[-1], *part.drafts][:NUM_HEADS]):
            x = torch.cat([x, embedding[token]])
            y = linear(x, f"hydra_mlp.{i}.0.res_connection")
            y = y + F.silu(linear(x, f"hydra_mlp.{i}.0.linear"))
            y = y + F.silu(linear(y, f"hydra_mlp.{i}.1.linear"))
            logits.append(linear(y, f"hydra_lm_head.{i}"))
        found.append(torch.stack(logits))
    return torch.stack(found)


@pytest.mark.parametrize(("size", "kernels"), RANKS_AND_KERNELS)
@pytest.mark.parametrize(
    ("file", "prefix"), [("hydra_lm_head.pt", ""), ("model.safetensors", "hydra_head.")]
)
def test_logits_equal_the_paper(tmp_path, target_dir, target, file, prefix, size, kernels):
    made, parts = hydra_weights(), sequences()
    save(tmp_path, CONFIG, {f"{prefix}{name}": tensor for name, tensor in made.items()}, file)
    found = head_logits(tmp_path, target_dir, parts, size=size, kernels=kernels)
    expected = reference(made, parts, target_dir)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    selected = selected_logits(tmp_path, target_dir, parts)
    torch.testing.assert_close(selected, expected[-1:], atol=1e-4, rtol=1e-4)
    config = HeadConfig.from_directory(tmp_path, target)
    assert (config.method, config.max_draft_tokens) == ("hydra", NUM_HEADS)
    assert config.weight_bytes("float32") == 4 * sum(each.numel() for each in made.values())
