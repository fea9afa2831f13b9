"""Quantized checkpoints of models with recurrent layers: the logits of what their codes stand for.

Ranks divide them, also by whole experts.
"""

import json
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.config.engine import DEFAULT_MODEL_OPTIONS, ModelOptions
from specdec.models.config.model_config import ModelConfig
from tests.specdec.fakes import run_ranks
from tests.specdec.models.families import save_family
from tests.specdec.models.hybrid_families import HYBRIDS
from tests.specdec.models.passes import mixed_logits
from tests.specdec.packing import awq, float8, gptq

GROUPS = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}}
FORMATS = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False}),
    "fp8": (
        partial(float8, per="block", block=16),
        {"quant_method": "fp8", "weight_block_size": [16, 16]},
    ),
    "compressed-tensors": (
        partial(float8, per="channel"),
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], **GROUPS}},
        },
    ),
}
NOT_LINEAR = ("conv", "norm", "router", ".gate.", "shared_expert_gate")

# Sizes in whole groups of 8 inputs and outputs.
DELTA = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2}
SIZES = {
    "FalconH1": {**MAMBA, "mamba_d_ssm": 96},
    "GraniteMoeHybrid": {**MAMBA, "shared_intermediate_size": 32},
    "KimiLinear": {"moe_intermediate_size": 24, "kv_lora_rank": 32},
    "Lfm2Moe": {"moe_intermediate_size": 24},
    "NemotronH": {
        **{"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2},
        **{"moe_shared_expert_intermediate_size": 32, "moe_latent_size": 24},
        "moe_intermediate_size": 24,
    },
    "OlmoHybrid": DELTA,
    "Qwen3Next": {**DELTA, "shared_expert_intermediate_size": 32, "moe_intermediate_size": 24},
}
MODELS = [
    *("falcon-h1", "granite-4-moe", "kimi-linear", "lfm2-moe", "nemotron-h", "olmo-hybrid"),
    *("qwen3-next", "jamba"),
]
QUICK = ("kimi-linear",)


def write(directory, name, pack, config):
    """Write a model twice: its linear layers packed, and as what they stand for."""
    sizes = {"hidden_size": 96, "intermediate_size": 104, **SIZES.get(HYBRIDS[name][0], {})}
    save_family(directory / "plain", name, **sizes)
    shutil.copytree(directory / "plain", directory / "packed")
    packed, plain, num_packed = {}, {}, 0
    for key, tensor in load_file(directory / "plain/model.safetensors").items():
        packed[key] = plain[key] = tensor
        is_linear = ".layers." in key and key.endswith(".weight") and tensor.ndim == 2
        fits = all(size % 8 == 0 for size in tensor.shape)
        if is_linear and fits and not any(part in key for part in NOT_LINEAR):
            del packed[key]
            tensors, plain[key] = pack(tensor)
            prefix, num_packed = key.removesuffix("weight"), num_packed + 1
            packed |= {prefix + suffix: stored for suffix, stored in tensors.items()}
    for kind, tensors in (("packed", packed), ("plain", plain)):
        save_file(tensors, directory / kind / "model.safetensors", {"format": "pt"})
    path = directory / "packed/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    return num_packed


def runs():
    """Yield (family, format, ranks, whole experts)."""
    for index, name in enumerate(MODELS):
        for place, each in enumerate(FORMATS):
            is_quick = name in QUICK and place == index % len(FORMATS)
            marks = () if is_quick else pytest.mark.slow
            yield pytest.param(name, each, 1 + index % 2, index % 4 == 3, marks=marks)


@pytest.mark.parametrize(("name", "form", "size", "by_expert"), list(runs()))
def test_logits_are_those_of_the_dequantized_weights(tmp_path, name, form, size, by_expert):
    assert write(tmp_path, name, *FORMATS[form]) >= 6
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 383, (40,), generator=generator).tolist() for _ in range(2)]
    options = ModelOptions(divides_by_expert=True) if by_expert else DEFAULT_MODEL_OPTIONS
    assert not by_expert or ModelConfig.from_directory(tmp_path / "packed").experts is not None
    found, expected = (
        torch.cat(
            run_ranks(count, partial(mixed_logits, tmp_path / kind, ids, options=each)),
            dim=1,
        )
        for kind, count, each in (("packed", size, options), ("plain", 1, DEFAULT_MODEL_OPTIONS))
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
