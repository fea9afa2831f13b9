"""LoRA adapters with random weights, in PEFT's layout: for costs only."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.random_heads import linear_shapes
from specdec.models.config.model_config import ModelConfig


def write_adapter(directory: Path, config: ModelConfig, rank: int, seed: int) -> Path:
    """Write an adapter of all linear layers in float32, as PEFT saves it; return its directory."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for layer in range(config.num_layers):
        for module, (outputs, inputs) in linear_shapes(config, config.hidden_size).items():
            prefix = f"base_model.model.model.layers.{layer}.{module}"
            down = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            up = torch.randn(outputs, rank, generator=generator) / rank**0.5
            tensors |= {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": 0.1 * up}
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (directory / "adapter_config.json").write_text(json.dumps(values))
    return directory
