# Modules: specdec.kernels.triton.device.packed, specdec.models.layers.quantized_matrix
"""Reference tests: products by weights in few bits, in Triton's interpreter."""

import pytest
import torch

from specdec.kernels.reference.packed_weight import (
    CodeKind,
    PackedWeight,
    pack_int4,
    quantize_weight,
)
from specdec.kernels.reference.rows import quantize_rows
from specdec.kernels.triton import packed
from specdec.models.layers.quantized_matrix import QuantizedMatrix

TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3}
SIZE, INNER = 72, 416


def weight_of(kind, group_size=None, *, has_zeros=False, size=SIZE, inner=INNER):
    generator = torch.Generator().manual_seed(3)
    if kind is CodeKind.FLOAT8:
        group = group_size or inner
        values = 100 * torch.randn(size, inner, generator=generator)
        codes = values.clamp(-448, 448).to(torch.float8_e4m3fn)  # larger ones become NaN
        codes[0, :3] = torch.tensor([0.0, 2.0**-9, -3 * 2.0**-9])  # zero and subnormal values
        scales = torch.rand(size, -(-inner // group), generator=generator) / 100
        return PackedWeight(kind, codes, scales, group)
    found = quantize_weight(torch.randn(size, inner, generator=generator), kind, group_size)
    if not has_zeros:
        return found
    codes = torch.randint(0, 16, (size, inner), generator=generator)
    zeros = torch.randint(0, 17, found.scales.shape, generator=generator, dtype=torch.uint8)
    return PackedWeight(kind, pack_int4(codes), found.scales.half(), found.group_size, zeros)


WEIGHTS = {
    "int4 in groups of 128": lambda: weight_of(CodeKind.INT4, 128),
    "int4 in groups of 32 with zeros": lambda: weight_of(CodeKind.INT4, 32, has_zeros=True),
    "int4 in groups of 128 with zeros": lambda: weight_of(CodeKind.INT4, 128, has_zeros=True),
    "int4 by output": lambda: weight_of(CodeKind.INT4),
    "int8 by output": lambda: weight_of(CodeKind.INT8),
    "int8 in groups of 24": lambda: weight_of(CodeKind.INT8, 24),
    "fp8 by output": lambda: weight_of(CodeKind.FLOAT8),
    "fp8 in groups of 128": lambda: weight_of(CodeKind.FLOAT8, 128),
    "fp8 in groups of 48": lambda: weight_of(CodeKind.FLOAT8, 48),
}


def rows_of(count, dtype=torch.float32, inner=INNER):
    generator = torch.Generator().manual_seed(4)
    return torch.randn(count, inner, generator=generator).to(dtype)


def assert_near(found, expected, dtype):
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", WEIGHTS)
def test_products_are_those_of_the_values(name, dtype):
    weight, x = WEIGHTS[name](), rows_of(3, dtype)
    expected = x.double() @ weight.values().double().t()
    assert_near(packed.multiply(x, weight), expected, dtype)
    base = torch.randn(SIZE, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert_near(packed.multiply(x, weight, base), expected + base.double(), dtype)
    wide = packed.multiply(x, weight, output=torch.empty(3, SIZE))
    assert_near(wide, expected, dtype)


@pytest.mark.parametrize("name", WEIGHTS)
def test_dequantized_weights_are_the_values(name):
    weight = WEIGHTS[name]()
    assert torch.equal(packed.dequantize(weight, torch.float32), weight.values())
    assert torch.equal(packed.dequantize(weight, torch.float16), weight.values().half())


@pytest.mark.parametrize("kind", CodeKind)
def test_bits_of_a_row_do_not_depend_on_its_batch(kind):
    """Beside others, in tiles of 16 or 32 rows, with parts in one program or in several."""
    weight = weight_of(kind, 128, size=64, inner=2200)
    assert packed.num_parts_of(*weight.shape) == 4
    x = rows_of(40, torch.float16, 2200)
    together = packed.multiply(x, weight)
    for row in (0, 17, 39):
        assert torch.equal(packed.multiply(x[row : row + 1], weight)[0], together[row])
    base = rows_of(40, torch.float16, 64)
    added = packed.multiply(x, weight, base)
    assert torch.equal(packed.multiply(x[5:9], weight, base[5:9]), added[5:9])


def test_words_of_4_bit_codes_may_begin_anywhere():
    """Where the rows of codes begin at no multiple of 16 bytes, no instruction copies as many."""
    weight, aligned = weight_of(CodeKind.INT4, 128, inner=400), weight_of(CodeKind.INT4, 128)
    assert packed.is_coarse(aligned, 128)
    assert not packed.is_coarse(weight, 128)
    x = rows_of(3, inner=400)
    expected = x.double() @ weight.values().double().t()
    assert_near(packed.multiply(x, weight), expected, torch.float32)


def test_one_program_adds_the_parts_to_the_same_bits(monkeypatch):
    weight = weight_of(CodeKind.INT4, 128, size=64, inner=1104)
    x, base = rows_of(2, inner=1104), rows_of(2, inner=64)
    split = packed.multiply(x, weight, base)
    monkeypatch.setattr(packed, "_ENOUGH_TILES", 0)
    assert torch.equal(packed.multiply(x, weight, base), split)


@pytest.mark.parametrize("group_size", [None, 128])
@pytest.mark.parametrize("inner", [400, 2200])
def test_products_of_8_bit_floats(inner, group_size):
    """By row and weight scales, or those of groups of 128 inputs of both; rows by torch."""
    weight = weight_of(CodeKind.FLOAT8, group_size, inner=inner)
    assert packed.fits_float8_products(weight)
    x = rows_of(18, inner=inner)
    group = group_size or inner
    grouped = torch.nn.functional.pad(x, (0, -inner % group)).view(-1, group)
    quantized, scales = quantize_rows(grouped, torch.float8_e4m3fn)
    values = (quantized.float() * scales[:, None]).view(18, -1)[:, :inner]
    own = quantized.view(torch.uint8).view(18, -1)[:, :inner].contiguous()
    base = rows_of(18, inner=SIZE)
    found = packed.float8_product(
        own.view(torch.float8_e4m3fn), scales, weight, base, None, torch.float32
    )
    expected = values.double() @ weight.values().double().t() + base.double()
    assert_near(found, expected, torch.float32)
    alone = packed.float8_product(
        own[7:8].view(torch.float8_e4m3fn),
        scales.view(18, -1)[7],
        weight,
        base[7:8],
        None,
        torch.float32,
    )
    assert torch.equal(alone[0], found[7])


def test_small_groups_are_multiplied_by_wider_rows():
    assert not packed.fits_float8_products(weight_of(CodeKind.FLOAT8, 48))
    assert not packed.fits_float8_products(weight_of(CodeKind.INT8))


@pytest.mark.parametrize("group_size", [None, 128])
def test_rows_become_8_bit_floats_for_these_products(group_size, monkeypatch):
    """Within the interpreter's rounding to fp8, which drops carries."""
    monkeypatch.setattr(packed, "has_float8_products", lambda device: True)
    weight = weight_of(CodeKind.FLOAT8, group_size)
    matrix, x = QuantizedMatrix(weight, is_invariant=False), rows_of(70)
    x[3] *= 1000  # a row alone has its scale
    base, expected = rows_of(70, inner=SIZE), x.double() @ weight.values().double().t()
    for found, exact in (
        (matrix.multiply(x), expected),
        (matrix.multiply_add(base, x), expected + base.double()),
        (matrix.multiply_to_float32(x), expected),
    ):
        error = (found.double() - exact).norm(dim=1) / exact.norm(dim=1)
        assert error.min() > 0
        assert error.max() < 0.2
