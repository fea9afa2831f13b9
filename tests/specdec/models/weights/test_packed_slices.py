# Modules: specdec.kernels.reference.packed_weight, specdec.models.weights.weight_slices
"""Reference tests: packed slices of checkpoints have the values of the dequantized ones."""

from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from specdec.kernels.reference.packed_weight import CodeKind, joined, pack_int4, unpack_int4
from specdec.models.weights.dequantize import weight_format
from specdec.models.weights.packed_slices import has_packed_kernels, read_packed
from specdec.models.weights.stored_tensors import StoredTensors
from tests.specdec.packing import awq, float8, gptq
from tests.specdec.packing_compressed import compressed, float8_blocks, four_bits

ROWS, COLS = 96, 192


def flat(weight):
    tensors, plain = float8(weight, per="channel")
    return tensors | {"weight_scale": tensors["weight_scale"].flatten()}, plain


def flat_four_bits(weight):
    tensors, plain = compressed(weight, group_size=-1)
    return tensors | {"weight_scale": tensors["weight_scale"].flatten()}, plain


def config_of(layout, group_size=16, **weights):
    group = {"weights": {"num_bits": 4, "group_size": group_size, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
    }


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16}
FP8 = {"quant_method": "fp8"}
BLOCKS = FP8 | {"weight_block_size": [48, 48]}
LAYOUTS = {
    "awq": (AWQ, partial(awq, group_size=16)),
    "gptq": (GPTQ, partial(gptq, group_size=16)),
    "gptq-sym": (GPTQ, partial(gptq, group_size=16, sym=True, with_index=False)),
    "gptq-act-order": (GPTQ, partial(gptq, group_size=16, desc_act=True)),
    "gptq-one-group": (GPTQ | {"group_size": -1}, partial(gptq, group_size=-1)),
    "compressed": (config_of("pack-quantized"), partial(compressed, group_size=16)),
    "compressed-asym": (
        config_of("pack-quantized", symmetric=False),
        partial(compressed, group_size=16, sym=False),
    ),
    "compressed-by-output": (
        config_of("pack-quantized", None),
        partial(compressed, group_size=-1),
    ),
    "compressed-by-output-flat": (config_of("pack-quantized", None), flat_four_bits),
    "compressed-int8": (
        config_of("int-quantized", None, num_bits=8),
        partial(compressed, bits=8, group_size=-1, is_packed=False),
    ),
    "compressed-fp8-blocks": (
        config_of("float-quantized", None, num_bits=8, block_structure=[48, 32]),
        float8_blocks,
    ),
    "fp8-tensor": (FP8, partial(float8, per="tensor")),
    "fp8-scalar": (FP8, partial(float8, per="scalar")),
    "fp8-channels": (FP8, partial(float8, per="channel")),
    "fp8-channels-flat": (FP8, flat),
    "fp8-blocks": (BLOCKS, partial(float8, per="block")),
}


def stored(tmp_path, config, pack):
    weight = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(0))
    tensors, _ = pack(weight)
    named = {f"layer.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, tmp_path / "model.safetensors")
    source = StoredTensors([tmp_path / "model.safetensors"], tmp_path)
    return weight_format(config), source


def values_of(packed):
    """Return the weight in the order of the inputs."""
    values = packed.values()
    if packed.order is None:
        return values
    return torch.empty_like(values).index_copy_(1, packed.order, values)


@pytest.mark.parametrize("name", LAYOUTS)
def test_values_are_those_of_the_dequantized_weight(tmp_path, name):
    layout, tensors = stored(tmp_path, *LAYOUTS[name])
    assert has_packed_kernels(layout)
    windows = [(range(ROWS), range(COLS)), (range(16, 56), range(COLS))]
    if name != "gptq-act-order":  # groups of a slice of these may have any size
        windows.append((range(8, 96), range(96, 192)))
    for rows, cols in windows:
        packed = read_packed(layout, tensors, "layer.weight", rows, cols)
        assert packed.shape == (len(rows), len(cols))
        expected = layout.read(tensors, "layer.weight", rows, cols)
        torch.testing.assert_close(values_of(packed), expected, atol=1e-6, rtol=1e-6)
        assert packed.num_bytes < 2 * len(rows) * len(cols)


@pytest.mark.parametrize(
    ("name", "cols"),
    [("awq", range(8, 192)), ("gptq-act-order", range(96)), ("compressed", range(24, 96))],
)
def test_slices_within_a_group_are_left_to_dequantization(tmp_path, name, cols):
    layout, tensors = stored(tmp_path, *LAYOUTS[name])
    assert read_packed(layout, tensors, "layer.weight", range(ROWS), cols) is None


def test_other_layouts_are_left_to_dequantization(tmp_path):
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    layout, tensors = stored(tmp_path, config, four_bits)
    assert not has_packed_kernels(layout)
    assert read_packed(layout, tensors, "layer.weight", range(ROWS), range(COLS)) is None
    eight = weight_format(GPTQ | {"bits": 8})
    assert not has_packed_kernels(eight)
    some = weight_format({"quant_method": "modelopt", "quant_algo": "NVFP4"})
    assert not has_packed_kernels(some)


@pytest.mark.parametrize(
    "config",
    [
        config_of("pack-quantized", num_bits=8),
        config_of("pack-quantized", actorder="group"),
        config_of("int-quantized", None, num_bits=8, symmetric=False),
    ],
    ids=["packed-8-bits", "act-order", "int8-asym"],
)
def test_layouts_of_compressed_tensors_without_kernels(config):
    assert not has_packed_kernels(weight_format(config))


def test_projections_of_one_input_are_joined(tmp_path):
    layout, tensors = stored(tmp_path, *LAYOUTS["gptq-act-order"])
    parts = [
        read_packed(layout, tensors, "layer.weight", rows, range(COLS))
        for rows in (range(40), range(40, 96))
    ]
    whole = read_packed(layout, tensors, "layer.weight", range(ROWS), range(COLS))
    assert torch.equal(joined(parts).values(), whole.values())
    taken = whole.take(torch.tensor([5, 3, 90]))
    assert torch.equal(taken.values(), whole.values()[[5, 3, 90]])


def test_projections_with_other_groups_are_not_joined(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    found = []
    for name, directory in (("gptq", "a"), ("gptq-act-order", "b")):
        layout, tensors = stored(tmp_path / directory, *LAYOUTS[name])
        found.append(read_packed(layout, tensors, "layer.weight", range(ROWS), range(COLS)))
    assert joined(found) is None
    assert found[0].kind is CodeKind.INT4


def test_words_have_the_lowest_bits_first():
    codes = torch.arange(16).view(1, 16)
    words = pack_int4(codes)
    assert words.tolist() == [[0x76543210, 0xFEDCBA98 - 2**32]]
    assert torch.equal(unpack_int4(words), codes.int())
