"""Steps of a mixture of experts beside the memory floor of the experts that its tokens reach."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.gpu.parts import Context, Result
from benchmarks.gpu.random_models import SMALL, random_decoder, write_config
from benchmarks.gpu.steps import BLOCK_SIZE, FEW, GREEDY, Sizes, Steps
from specdec.models.config.model_config import ModelConfig
from specdec.models.layers.mixture import SparseMLP
from specdec.models.llama import CausalDecoder

_MIXTURE: Mapping[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
_QWEN3_30B: Mapping[str, Any] = {
    **SMALL,
    **_MIXTURE,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 12,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
"""Sizes of Qwen3-30B-A3B, with a quarter of its layers."""
_SMALL: Mapping[str, Any] = {
    **SMALL,
    **_MIXTURE,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
_SIZES = Sizes((1, 8, 64, 256), (1024,), (0, 7), 2**20)


def measure_mixture(context: Context) -> Result:
    """Measure greedy steps; floor_ms: of reading the experts that as many random routes reach."""
    model = write_config(context.directory / "mixture", _SMALL if context.is_small else _QWEN3_30B)
    length = model.max_position_embeddings
    decoder = random_decoder(model, context.device, torch.bfloat16, length, BLOCK_SIZE)
    sizes = FEW if context.is_small else _SIZES
    steps = Steps(decoder, model, sizes, has_graphs=True)
    result: Result = {"graphs": steps.report.describe(), "cells": []}
    result["passed"] = decoder.fits_graphs or not context.is_gpu
    expert_bytes = _expert_bytes(decoder)
    for batch in sizes.batches:
        for num_drafts in sizes.drafts:
            cell = steps.measure(batch, sizes.contexts[0], num_drafts, GREEDY)
            unread = expert_bytes * (1 - _share_read(model, batch * (1 + num_drafts)))
            floor_ms = cell.floor_ms - unread / steps.bandwidth * 1e3
            found = {"batch": batch, "num_drafts": num_drafts, "step_ms": cell.step_ms}
            ratio = cell.step_ms / floor_ms
            result["cells"].append({**found, "floor_ms": floor_ms, "ratio": ratio})
            context.save(result)
    return result


def _expert_bytes(decoder: CausalDecoder) -> int:
    """Return the bytes of all experts, without routers."""
    mixtures = [each for each in decoder.modules() if isinstance(each, SparseMLP)]
    linears = (each for mixture in mixtures for each in mixture.experts.modules())
    weights = (getattr(getattr(each, "matrix", None), "weight", None) for each in linears)
    return sum(each.nbytes for each in weights if isinstance(each, torch.Tensor))


def _share_read(model: ModelConfig, num_rows: int) -> float:
    """Return the expected share of the experts that random routes of some rows reach."""
    experts = model.experts
    assert experts is not None
    return 1.0 - (1 - experts.num_per_token / experts.count) ** num_rows
