"""Scales of the KV cache in checkpoints."""

import pytest
import torch
from safetensors.torch import save_file

from specdec.kernels.reference.kv_scales import UNIT_SCALES, KVScales
from specdec.models.weights.checkpoint import open_checkpoint
from specdec.models.weights.kv_scales import read_kv_scales
from specdec.types.errors import UnsupportedModelError

PREFIX = "model.layers.0.self_attn"


def scales_of(directory, tensors):
    stored = {f"{PREFIX}.{name}": torch.as_tensor(value) for name, value in tensors.items()}
    save_file({"other": torch.zeros(1), **stored}, directory / "model.safetensors")
    return read_kv_scales(open_checkpoint(directory, torch.float32).tensors, PREFIX)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("k_scale", "v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_each_name_of_the_scales_is_read(tmp_path, key, value, shape):
    stored = {key: torch.full(shape, 0.5), value: torch.full(shape, 0.25, dtype=torch.bfloat16)}
    assert scales_of(tmp_path, stored) == KVScales(0.5, 0.25)


def test_one_scale_for_both(tmp_path):
    assert scales_of(tmp_path, {"kv_scale": [0.75]}) == KVScales(0.75, 0.75)


def test_without_scales_they_are_one(tmp_path):
    assert scales_of(tmp_path, {}) == UNIT_SCALES


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        ({"k_scale": [0.5, 0.5], "v_scale": [1.0]}, r"k_scale has shape \[2\]; expected one"),
        ({"k_scale": [0.5], "v_scale": [0.0]}, r"v_scale is 0\.0; it must be a positive number"),
        ({"k_scale": [float("nan")], "v_scale": [1.0]}, "k_scale is nan"),
        ({"k_scale": [0.5]}, r"has no tensor model\.layers\.0\.self_attn\.v_scale"),
    ],
)
def test_other_scales_are_refused(tmp_path, stored, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        scales_of(tmp_path, stored)
