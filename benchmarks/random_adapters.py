"""LoRA adapters with random weights, in PEFT's layout: for costs only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.random_heads import linear_shapes
from specdec.models.config.model_config import ModelConfig


def write_adapter(directory: Path, config: ModelConfig, rank: int, seed: int) -> Path:
    """Write an adapter of all linear layers in float32, as PEFT saves it; return its directory."""
    shapes = {
        f"model.layers.{layer}.{module}": shape
        for layer in range(config.num_layers)
        for module, shape in linear_shapes(config, config.hidden_size).items()
    }
    return _write(directory, shapes, rank, seed)


def write_eagle3_adapter(directory: Path, target: ModelConfig, rank: int, seed: int) -> Path:
    """Write an adapter of the head that `random_heads.write_eagle3` writes for a target."""
    size = target.hidden_size
    layer = linear_shapes(target, 2 * size).items()
    shapes = {"fc": (size, 3 * size), **{f"midlayer.{module}": shape for module, shape in layer}}
    return _write(directory, shapes, rank, seed)


def _write(directory: Path, shapes: Mapping[str, tuple[int, int]], rank: int, seed: int) -> Path:
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for module, (outputs, inputs) in shapes.items():
        prefix = f"base_model.model.{module}"
        down = torch.randn(rank, inputs, generator=generator) / inputs**0.5
        up = torch.randn(outputs, rank, generator=generator) / rank**0.5
        tensors |= {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": 0.1 * up}
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (directory / "adapter_config.json").write_text(json.dumps(values))
    return directory
