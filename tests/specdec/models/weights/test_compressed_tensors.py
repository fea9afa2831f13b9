"""Reference tests: tensors of compressed-tensors that several layouts or shapes fit."""

from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from specdec.models.weights.dequantize import weight_format
from specdec.models.weights.stored_tensors import StoredTensors
from specdec.types.errors import UnsupportedModelError
from tests.specdec.packing import float8
from tests.specdec.packing_compressed import compressed, float8_blocks


def config_of(*groups):
    """Return the config of packed integers with groups of layers that have these keys."""
    described = {
        str(index): {"format": keys.get("format"), "weights": keys}
        for index, keys in enumerate(groups)
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": described,
    }


FOUR_BITS = {"num_bits": 4, "group_size": 8}
ASYMMETRIC = FOUR_BITS | {"symmetric": False}
OUTPUTS = {"num_bits": 4, "symmetric": False}


def weight():
    return torch.randn(64, 192, generator=torch.Generator().manual_seed(0))


def stored(tmp_path, pack):
    """Return the tensors of a weight [64, 192]."""
    tensors, _ = pack(weight())
    path = tmp_path / "model.safetensors"
    save_file({f"a.{name}": each.contiguous() for name, each in tensors.items()}, path)
    return StoredTensors([path], tmp_path)


@pytest.mark.parametrize(
    ("groups", "pack", "names"),
    [
        (
            (FOUR_BITS | {"num_bits": 7}, FOUR_BITS | {"num_bits": 8}),
            partial(compressed, bits=8),
            ("num_bits 7", "num_bits 8"),
        ),
        (
            (FOUR_BITS | {"group_size": 96}, FOUR_BITS | {"group_size": 128}),
            partial(compressed, group_size=128),
            ("group_size 96", "group_size 128"),
        ),
    ],
    ids=["bits", "group-sizes"],
)
def test_tensors_of_layouts_that_read_them_differently_are_refused(tmp_path, groups, pack, names):
    layout, tensors = weight_format(config_of(*groups)), stored(tmp_path, pack)
    kind = "format pack-quantized, type int"
    what = rf"the tensors of a\.weight fit several .*{kind}, .*{names[0]}.*; and {kind}.*{names[1]}"
    with pytest.raises(UnsupportedModelError, match=what):
        layout.read(tensors, "a.weight", range(64), range(192))
    with pytest.raises(UnsupportedModelError, match=what):
        layout.parts(tensors, "a.weight", (64, 192))


EIGHT_BITS = {"num_bits": 8, "format": "int-quantized"}
FLOATS = {"num_bits": 8, "format": "float-quantized", "type": "float"}
BY_OUTPUT = partial(compressed, group_size=-1)
ASYMMETRIC_INT8 = partial(BY_OUTPUT, bits=8, is_packed=False, sym=False, packs_zeros=False)
FP8_OUTPUTS = partial(float8, per="channel")


@pytest.mark.parametrize(
    ("groups", "pack"),
    [
        *(((FOUR_BITS, ASYMMETRIC), partial(compressed, sym=sym)) for sym in (True, False)),
        *(
            ((FOUR_BITS | {"actorder": "group"}, FOUR_BITS), partial(compressed, permuted=permuted))
            for permuted in (True, False)
        ),
        *(((OUTPUTS, FLOATS), pack) for pack in (partial(BY_OUTPUT, sym=False), FP8_OUTPUTS)),
        *(((OUTPUTS | EIGHT_BITS, FLOATS), pack) for pack in (ASYMMETRIC_INT8, FP8_OUTPUTS)),
        (
            tuple(FLOATS | {"block_structure": [rows, 128]} for rows in (64, 128)),
            partial(float8_blocks, rows=64, cols=128),
        ),
        (
            tuple(FOUR_BITS | {"group_size": size} for size in (192, 256)),
            partial(compressed, group_size=-1),
        ),
    ],
)
def test_layouts_that_read_a_weight_alike_may_both_fit(tmp_path, groups, pack):
    layout = weight_format(config_of(*groups))
    tensors, plain = stored(tmp_path, pack), pack(weight())[1]
    layout.parts(tensors, "a.weight", (64, 192))
    assert torch.equal(layout.read(tensors, "a.weight", range(64), range(192)), plain)


def test_a_missing_tensor_is_named_where_no_layout_fits(tmp_path):
    layout, tensors = weight_format(config_of(ASYMMETRIC, OUTPUTS)), stored(tmp_path, compressed)
    with pytest.raises(UnsupportedModelError, match=r"no tensor a\.weight_zero_point"):
        layout.parts(tensors, "a.weight", (64, 192))


CLASS, PATTERN, NAME = (["Linear"], ["re:.*a$"], ["a"])


@pytest.mark.parametrize(
    ("of_symmetric", "of_asymmetric", "is_read"),
    [
        (CLASS, PATTERN, False),
        (PATTERN, NAME, False),
        (["re:b"], CLASS, False),
        (NAME, CLASS, True),
        (PATTERN, CLASS, True),
        (CLASS, ["b", "re:b", "re:(", "re:a{99999999999}"], True),
        (CLASS, CLASS, True),
    ],
)
def test_a_layer_of_an_asymmetric_group_without_zero_points_is_refused(
    tmp_path, of_symmetric, of_asymmetric, is_read
):
    """The tensors alone fit the symmetric layout too."""
    config = config_of(FOUR_BITS, ASYMMETRIC)
    for group, targets in zip(
        config["config_groups"].values(), (of_symmetric, of_asymmetric), strict=True
    ):
        group["targets"] = targets
    layout, tensors = weight_format(config), stored(tmp_path, compressed)
    if is_read:
        assert layout.parts(tensors, "a.weight", (64, 192))
        return
    with pytest.raises(UnsupportedModelError, match=r"no tensor a\.weight_zero_point"):
        layout.parts(tensors, "a.weight", (64, 192))


def test_targets_are_compiled_once_and_only_where_they_decide(tmp_path, monkeypatch):
    config = config_of(FOUR_BITS, ASYMMETRIC)
    for group, targets in zip(config["config_groups"].values(), (PATTERN, ["re:b"]), strict=True):
        group["targets"] = targets
    layout, tensors = weight_format(config), stored(tmp_path, compressed)
    monkeypatch.setattr("specdec.models.weights.compressed_tensors.re", None)
    assert layout.parts(tensors, "a.weight", (64, 192))
    config = config_of(FOUR_BITS, FOUR_BITS | {"num_bits": 8})
    config["config_groups"]["0"]["targets"] = PATTERN
    assert [each.groups for each in weight_format(config).layouts] == [(), ()]


@pytest.mark.parametrize(
    "zeros", [torch.zeros(2, dtype=torch.int8), torch.zeros(8, 1, dtype=torch.int32)]
)
def test_zero_points_of_blocks_have_the_shape_of_the_scales(tmp_path, zeros):
    def pack(weight):
        tensors, plain = compressed(weight)
        return tensors | {"weight_scale": torch.ones(2, 1), "weight_zero_point": zeros}, plain

    layout = weight_format(config_of(ASYMMETRIC | {"block_structure": [32, 192]}))
    with pytest.raises(UnsupportedModelError, match=r"weight_zero_point has shape .* \[2, 1\]"):
        layout.parts(stored(tmp_path, pack), "a.weight", (64, 192))


@pytest.mark.parametrize(
    ("packs_zeros", "parts"),
    [
        (True, ["weight_scale"]),
        (False, ["weight_scale"]),
        (False, ["weight_zero_point"]),
        (False, ["weight_scale", "weight_zero_point"]),
    ],
)
def test_scales_and_zero_points_of_outputs_may_have_one_dimension(tmp_path, packs_zeros, parts):
    def pack(weight):
        tensors, plain = compressed(weight, group_size=-1, sym=False, packs_zeros=packs_zeros)
        return tensors | {part: tensors[part].flatten() for part in parts}, plain

    plain = stored(tmp_path, partial(compressed, group_size=-1, sym=False))
    layout, window = weight_format(config_of(OUTPUTS)), ("a.weight", range(3, 60), range(64))
    expected = layout.read(plain, *window).clone()
    tensors = stored(tmp_path, pack)
    layout.parts(tensors, "a.weight", (64, 192))
    assert torch.equal(layout.read(tensors, *window), expected)


def test_zero_points_of_another_shape_than_the_scales_are_refused(tmp_path):
    def pack(weight):
        tensors, plain = compressed(weight, group_size=-1, sym=False, packs_zeros=False)
        return tensors | {"weight_zero_point": tensors["weight_zero_point"][:1]}, plain

    layout = weight_format(config_of(OUTPUTS))
    with pytest.raises(UnsupportedModelError, match=r"has shape \[1, 1\]; expected \[64\] or"):
        layout.parts(stored(tmp_path, pack), "a.weight", (64, 192))
