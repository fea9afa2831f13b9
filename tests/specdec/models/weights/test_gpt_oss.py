# Modules: specdec.models.weights.fp4
"""The experts of GPT-OSS in MXFP4 are those that transformers dequantizes, on any rank."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from specdec.models.config.model_config import ModelConfig
from specdec.models.weights.checkpoint import open_checkpoint
from specdec.types.errors import UnsupportedModelError
from tests.specdec.fakes import run_ranks
from tests.specdec.models.families import save_family
from tests.specdec.models.passes import mixed_logits

NAMES = ("gate_up_proj", "down_proj")


def packed(tensors, generator):
    """Return a checkpoint's tensors with random experts in MXFP4."""
    found = dict(tensors)
    for name in tensors:
        if name.endswith(NAMES):
            count, inputs, outputs = found.pop(name).shape
            shape = (count, outputs, inputs // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(121, 126, shape, generator=generator, dtype=torch.uint8)
            found |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return found


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """A model with experts in MXFP4, and the same as transformers dequantizes it."""
    quantized, plain = tmp_path_factory.mktemp("mxfp4"), tmp_path_factory.mktemp("plain")
    save_family(plain, "gpt-oss", hidden_size=96, intermediate_size=64)
    shutil.copytree(plain, quantized, dirs_exist_ok=True)
    tensors = packed(load_file(plain / "model.safetensors"), torch.Generator().manual_seed(4))
    save_file(tensors, quantized / "model.safetensors", metadata={"format": "pt"})
    for name in [each for each in tensors if each.endswith("_blocks")]:
        blocks, scales = tensors.pop(name), tensors.pop(name.replace("_blocks", "_scales"))
        values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        tensors[name.removesuffix("_blocks")] = values.contiguous()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    path = quantized / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    path.write_text(json.dumps(config))
    return quantized, plain


@pytest.mark.parametrize("size", [1, 3])  # 64 units, of which a rank has parts of groups
def test_mxfp4_has_the_logits_of_the_dequantized_model(directories, size):
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 383, (40,), generator=generator).tolist() for _ in range(2)]
    quantized, plain = (
        torch.cat(run_ranks(size, lambda group, path=path: mixed_logits(path, ids, group)), dim=1)
        for path in directories
    )
    assert torch.equal(quantized, plain)
    assert quantized.std() > 0.1


def test_all_weights_are_counted(directories):
    quantized, plain = (ModelConfig.from_directory(each) for each in directories)
    assert quantized.num_parameters == plain.num_parameters
    assert quantized.experts.has_bias
    reader = open_checkpoint(directories[0], torch.float32)
    found = reader.read("model.layers.1.mlp.experts.4.up_proj.weight", (64, 96), range(3), None)
    assert found.shape == (3, 96)
    with pytest.raises(UnsupportedModelError, match="shape"):
        reader.read("model.layers.1.mlp.experts.4.up_proj.weight", (96, 64))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_experts_stay_as_short_as_they_are_stored(directories, tmp_path, stored):
    copy = shutil.copytree(directories[1], tmp_path / "copy")
    weights = load_file(copy / "model.safetensors")
    save_file({name: each.to(stored) for name, each in weights.items()}, copy / "model.safetensors")
    names = [f"model.layers.1.mlp.experts.4.{name}_proj.weight" for name in ("gate", "up")]
    assert open_checkpoint(copy, torch.float32).exact_dtype(*names) == stored
    quantized = open_checkpoint(directories[0], torch.float32)
    assert quantized.exact_dtype(*names) == torch.float32


@pytest.mark.parametrize(("key", "limit"), [("swiglu_limit", "7.0"), ("swiglu_alpha", "1.702")])
def test_another_activation_is_refused(directories, key, limit):
    raw = json.loads((directories[1] / "config.json").read_text()) | {key: 6.0}
    with pytest.raises(UnsupportedModelError, match=rf"{key} in config.json is 6.0; .* {limit}"):
        ModelConfig.from_dict(raw, {})
