# Modules: specdec.models.weights.bitsandbytes
"""Reference tests: quantized checkpoints against their dequantized weights."""

import logging
from functools import partial

import pytest
import torch

from specdec.models.config.model_config import ModelConfig
from specdec.models.loading import load_model
from specdec.models.weights.checkpoint import open_checkpoint
from specdec.models.weights.dequantize import weight_format
from specdec.types.errors import UnsupportedModelError
from tests.specdec.fakes import run_ranks
from tests.specdec.models.passes import mixed_logits
from tests.specdec.packing import awq, float8, gptq, write_packed
from tests.specdec.packing_compressed import (
    compressed,
    float4,
    float8_blocks,
    four_bits,
    int8_rows,
)
from tests.specdec.tiny import tiny_llama_dir

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "checkpoint_format": "gptq"}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [48, 48]}
CHANNELS = {"quant_method": "compressed-tensors", "format": "float-quantized"}


def integers(kind="pack-quantized", bits=4, **weights):
    """Return the config of compressed-tensors with integers."""
    group = {"weights": {"type": "int", "num_bits": bits, **weights}, "targets": ["Linear"]}
    return CHANNELS | {"format": kind, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def unordered(weight):
    """Return a weight whose activation order was configured, and never found."""
    tensors, plain = compressed(weight)
    return tensors | {"weight_g_idx": torch.full((weight.shape[1],), -1, dtype=torch.int32)}, plain


def inverse(weight):
    """Return a weight with the scale of the matrix under the name of scales of blocks."""
    tensors, plain = float8(weight, per="scalar")
    return {"weight": tensors["weight"], "weight_scale_inv": tensors["weight_scale"]}, plain


def flat(weight):
    """Return a weight with the scales of its outputs as ModelOpt stores them, [out]."""
    tensors, plain = float8(weight, per="channel")
    return tensors | {"weight_scale": tensors["weight_scale"].flatten()}, plain


def mixed(of_mlp, of_attention):
    """Return a function that packs matrices of MLPs in one way, and those of attention another."""
    return lambda weight: (of_mlp if 208 in weight.shape else of_attention)(weight)


GROUPS = {"group_size": 8, "strategy": "group"}
MIXED = CHANNELS | {
    "format": "mixed-precision",
    "config_groups": {
        "group_0": {"format": "float-quantized", "weights": {"num_bits": 8, "type": "float"}},
        "group_1": {"format": "nvfp4-pack-quantized", "weights": {"num_bits": 4, "group_size": 16}},
        "group_2": {"targets": ["LlamaAttention"], "weights": None},
    },
}
MXFP8 = {"format": "mxfp8-quantized", "weights": {"num_bits": 8, "group_size": 32}}
NVFP4 = partial(float4, is_nvfp4=True)
FOUR_BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True}
EIGHT_BITS = {"quant_method": "bitsandbytes", "load_in_8bit": True}

FORMATS = {
    "awq": (AWQ, awq),
    "awq-wide-groups": (AWQ | {"group_size": 72}, partial(awq, group_size=72)),
    "gptq": (GPTQ, gptq),
    "gptq-sym": (GPTQ, partial(gptq, sym=True)),
    "gptq-act-order": (GPTQ | {"desc_act": True}, partial(gptq, desc_act=True)),
    "gptq-no-index": (GPTQ, partial(gptq, with_index=False)),
    "gptq-one-group": (GPTQ | {"group_size": -1}, partial(gptq, group_size=-1, with_index=False)),
    "gptq-8-bits": (GPTQ | {"bits": 8}, partial(gptq, bits=8)),
    "gptq-2-bits": (GPTQ | {"bits": 2}, partial(gptq, bits=2)),
    "gptq-own-groups": (
        GPTQ | {"group_size": 16, "dynamic": {"+:.*": {"group_size": 8}}},
        partial(gptq, with_index=False),
    ),
    "gptq-of-another-version": (GPTQ | {"sym": True}, partial(gptq, sym=True, version=2)),
    "gptq-version-2": (GPTQ | {"checkpoint_format": "gptq_v2"}, partial(gptq, version=2)),
    "fp8-tensor": ({"quant_method": "fp8"}, partial(float8, per="tensor")),
    "fp8-scalar": ({"quant_method": "fp8"}, partial(float8, per="scalar")),
    "fp8-scalar-inverse": ({"quant_method": "fp8", "weight_block_size": None}, inverse),
    "fp8-blocks": (BLOCKS, partial(float8, per="block")),
    "fp8-channels": (CHANNELS, partial(float8, per="channel")),
    "fp8-channels-flat": ({"quant_method": "fp8"}, flat),
    "compressed-fp8-flat": (CHANNELS, flat),
    "compressed-fp8-blocks": (
        integers("float-quantized", 8, block_structure=[48, 32], strategy="block"),
        float8_blocks,
    ),
    "compressed-groups": (integers(**GROUPS), compressed),
    "compressed-asym": (integers(**GROUPS), partial(compressed, sym=False)),
    "compressed-asym-older": (
        integers(**GROUPS),
        partial(compressed, sym=False, packs_zeros=False),
    ),
    "compressed-act-order": (
        integers(**GROUPS, actorder="group"),
        partial(compressed, permuted=True, sym=False),
    ),
    "compressed-no-order": (integers(**GROUPS, actorder="group"), unordered),
    "compressed-3-bits": (integers(bits=3, **GROUPS), partial(compressed, bits=3, sym=False)),
    **{
        f"compressed-{bits}-bits-dense": (
            integers(bits=bits, symmetric=False, **GROUPS),
            partial(compressed, bits=bits, sym=False, is_dense=True),
        )
        for bits in (3, 5, 6, 7)
    },
    "compressed-8-bits": (
        integers(bits=8, strategy="channel"),
        partial(compressed, bits=8, group_size=-1),
    ),
    "compressed-int8": (
        integers("int-quantized", 8, strategy="channel"),
        partial(compressed, bits=8, group_size=-1, is_packed=False, sym=False, packs_zeros=False),
    ),
    "compressed-nvfp4": (
        integers("nvfp4-pack-quantized", 4, type="float", strategy="tensor_group"),
        NVFP4,
    ),
    "compressed-mixed": (MIXED, mixed(NVFP4, partial(float8, per="channel"))),
    "compressed-mixed-bits": (
        integers(**GROUPS)
        | {"config_groups": {bits: {"weights": {"num_bits": bits, **GROUPS}} for bits in (4, 8)}},
        mixed(compressed, partial(compressed, bits=8)),
    ),
    "modelopt-mixed": (
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        mixed(partial(NVFP4, is_modelopt=True), partial(float8, per="scalar")),
    ),
    "compressed-mxfp4": (
        integers("mxfp4-pack-quantized", 4, type="float", strategy="group"),
        partial(float4, is_nvfp4=False),
    ),
    "nf4": (FOUR_BITS, four_bits),
    "nf4-nested": (FOUR_BITS, partial(four_bits, nested=True)),
    "fp4": (FOUR_BITS, partial(four_bits, kind="fp4")),
    "bitsandbytes-int8": (EIGHT_BITS, int8_rows),
}

VARIANTS = {
    *("awq-wide-groups", "gptq-sym", "gptq-no-index", "gptq-8-bits", "gptq-2-bits", "fp8-scalar"),
    *("compressed-asym-older", "compressed-act-order", "compressed-no-order"),
    *("compressed-3-bits", "nf4", "fp4", "fp8-scalar-inverse", "gptq-own-groups"),
    *("compressed-fp8-flat", "compressed-mixed-bits"),
    *("gptq-of-another-version", *(f"compressed-{bits}-bits-dense" for bits in (3, 5, 6, 7))),
}
"""Formats of which make test compares slices alone; another one of their layout has logits."""

LOGITS = [
    pytest.param(name, marks=pytest.mark.slow) if name in VARIANTS else name for name in FORMATS
]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A model whose dimensions are multiples of 16, and not of 48."""
    directory = tmp_path_factory.mktemp("source")
    return tiny_llama_dir(directory, intermediate=208, layers=1)


@pytest.fixture(params=FORMATS)
def model_dirs(request, source, tmp_path):
    config, pack = FORMATS[request.param]
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    if request.param == "awq-wide-groups":
        source = tiny_llama_dir(tmp_path / "source", intermediate=216, layers=1)
    if request.param == "compressed-mxfp4":  # groups of 32 inputs
        source = tiny_llama_dir(
            tmp_path / "source", hidden=160, heads=10, intermediate=224, kv_heads=5, layers=1
        )
    write_packed(source, packed, plain, config, pack)
    return packed, plain


def test_any_slice_equals_that_of_the_dequantized_weight(model_dirs):
    packed, plain = model_dirs
    name = "model.layers.0.mlp.up_proj.weight"
    reader = open_checkpoint(packed, torch.float32)
    expected = open_checkpoint(plain, torch.float32)
    assert reader.exact_dtype(name) == torch.float32
    config = ModelConfig.from_directory(plain)
    shape = (config.intermediate_size, config.hidden_size)
    for rows in (None, range(0, 1), range(3, 60), range(199, shape[0])):
        for cols in (None, range(0, 7), range(5, 97), range(143, 144)):
            found = reader.read(name, shape, rows, cols)
            assert torch.equal(found, expected.read(name, shape, rows, cols))


@pytest.mark.parametrize("model_dirs", LOGITS, indirect=True)
def test_logits_equal_those_of_the_dequantized_weights(model_dirs):
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 383, (40,), generator=generator).tolist() for _ in range(2)]
    found, expected = (
        torch.cat(run_ranks(3, lambda group, at=at: mixed_logits(at, ids, group)), dim=1)
        for at in model_dirs
    )
    assert torch.equal(found, expected)


def test_a_warning_states_the_cost_of_dequantization(source, tmp_path, caplog):
    write_packed(source, tmp_path / "packed", tmp_path / "plain", AWQ, awq)
    with caplog.at_level(logging.WARNING):
        for directory in (tmp_path / "packed", tmp_path / "plain"):
            open_checkpoint(directory, torch.float32)
    (record,) = caplog.records
    assert "dequantized during loading" in record.getMessage()


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        (CHANNELS | {"format": "marlin-24"}, "compressed-tensors marlin-24"),
        (integers(**GROUPS) | {"transform_config": {"R1": {}}}, "compressed-tensors"),
        (
            integers(**GROUPS) | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "compressed-tensors",
        ),
        ({"quant_method": "gptq", "bits": 3}, "gptq 3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq 4 bits"),
        (integers(bits=16), "compressed-tensors"),
        (
            MIXED | {"config_groups": MIXED["config_groups"] | {"group_2": MXFP8}},
            "compressed-tensors mixed-precision",
        ),
        ({}, "an unnamed method"),
    ],
)
def test_the_error_for_an_unknown_format_lists_the_supported_ones(config, what):
    with pytest.raises(UnsupportedModelError, match=f"quantized by {what} .*; supported: awq"):
        weight_format(config)


def test_a_weight_of_none_of_several_layouts_is_refused(source, tmp_path):
    def pack(weight):
        tensors, plain = NVFP4(weight, is_modelopt=True)
        return tensors | {"weight_scale": torch.ones(3)}, plain

    write_packed(source, tmp_path / "a", tmp_path / "b", FORMATS["modelopt-mixed"][0], pack)
    with pytest.raises(UnsupportedModelError, match=r"has shape \[3\]; .*; or .* has "):
        run_ranks(1, lambda group: load(tmp_path / "a", group))


def test_four_bits_in_another_storage_type_are_refused(source, tmp_path):
    def pack(weight):
        tensors, plain = four_bits(weight)
        return tensors | {
            "weight": tensors["weight"].flatten().view(torch.bfloat16)[:, None]
        }, plain

    write_packed(source, tmp_path / "a", tmp_path / "b", FOUR_BITS, pack)
    with pytest.raises(UnsupportedModelError, match="bnb_4bit_quant_storage must be uint8"):
        run_ranks(1, lambda group: load(tmp_path / "a", group))


@pytest.mark.parametrize(
    "state",
    [b"{", b"[]", b"{}", b'{"shape": [8], "blocksize": 8}', b'{"shape": [8, 8]}', b"[" * 9000],
    ids=lambda state: state.decode()[:30],
)
def test_four_bits_without_a_valid_state_are_refused(source, tmp_path, state):
    def pack(weight):
        tensors, plain = four_bits(weight)
        stored = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        return tensors | {"weight.quant_state.bitsandbytes__nf4": stored}, plain

    write_packed(source, tmp_path / "a", tmp_path / "b", FOUR_BITS, pack)
    with pytest.raises(UnsupportedModelError, match="nf4 does not describe a matrix"):
        run_ranks(1, lambda group: load(tmp_path / "a", group))


@pytest.mark.parametrize(
    "weights", [{"group_size": 0}, {"num_bits": True}, {"block_structure": "8x8"}]
)
def test_sizes_of_a_layout_are_checked(weights):
    with pytest.raises(UnsupportedModelError, match=f"{next(iter(weights))} in config.json is"):
        weight_format(integers(**weights))


def test_a_config_with_an_unknown_format_is_rejected(source, tmp_path):
    write_packed(source, tmp_path / "a", tmp_path / "b", {"quant_method": "quip"}, awq)
    with pytest.raises(UnsupportedModelError, match="quantized by quip"):
        ModelConfig.from_directory(tmp_path / "a")


def test_block_scales_without_a_block_size_are_rejected(source, tmp_path):
    pack = partial(float8, per="block")
    write_packed(source, tmp_path / "a", tmp_path / "b", {"quant_method": "fp8"}, pack)
    with pytest.raises(UnsupportedModelError, match="needs a weight_block_size"):
        run_ranks(1, lambda group: load(tmp_path / "a", group))


@pytest.mark.parametrize(
    ("config", "pack", "name"),
    [
        (FOUR_BITS, four_bits, "weight.absmax"),
        (*FORMATS["compressed-nvfp4"], "weight_scale"),
    ],
)
def test_a_missing_factor_of_four_bits_is_reported(source, tmp_path, config, pack, name):
    def shortened(weight):
        tensors, plain = pack(weight)
        return tensors | {name: tensors[name][..., 1:].contiguous()}, plain

    write_packed(source, tmp_path / "a", tmp_path / "b", config, shortened)
    with pytest.raises(UnsupportedModelError, match=rf"{name} has shape .*; expected"):
        run_ranks(1, lambda group: load(tmp_path / "a", group))


def test_scales_of_another_shape_are_rejected(source, tmp_path):
    def pack(weight):
        tensors, plain = float8(weight, per="channel")
        return tensors | {"weight_scale": torch.ones(3, 1)}, plain

    write_packed(source, tmp_path / "a", tmp_path / "b", CHANNELS, pack)
    with pytest.raises(UnsupportedModelError, match=r"weight_scale has shape \[3, 1\]"):
        run_ranks(1, lambda group: load(tmp_path / "a", group))


def load(directory, group):
    config = ModelConfig.from_directory(directory)
    return load_model(directory, config, group, dtype=torch.float32, max_model_len=64, block_size=4)
