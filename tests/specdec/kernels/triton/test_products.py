# Modules: specdec.kernels.triton.device.products
"""Matrix products whose rows have the same bits in any batch."""

import pytest
import torch

from specdec.kernels.triton import products
from specdec.kernels.triton.products import (
    FEW_ROWS_TILE,
    MANY_ROWS_TILE,
    MAPPED_PARTS_TILE,
    MAPPED_TILE,
    multiply,
    multiply_by_tiles,
    multiply_heads,
    num_parts_of,
    tile_of,
)

TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-2}
SIZE, INNER = 70, 330


@pytest.fixture
def four_parts(monkeypatch):
    """Divide small inner dimensions; the last part of INNER is empty."""
    monkeypatch.setattr(products, "_LEAST_PART", 64)
    assert num_parts_of(SIZE, INNER) == 4


def matrices(num_rows, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = ((num_rows, INNER), (SIZE, INNER), (num_rows, SIZE), (SIZE,))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 65])
def test_a_product_is_that_of_torch(four_parts, num_rows, dtype):
    x, weight, base, bias = matrices(num_rows, dtype)
    expected = x.double() @ weight.double().t()
    for own in (None, base, bias):
        found = multiply(x, weight, own)
        assert found.dtype == dtype
        whole = expected if own is None else expected + own
        assert (found - whole).abs().max() < TOLERANCE[dtype]
    in_place = base.clone()
    assert multiply(x, weight, in_place, in_place) is in_place
    assert torch.equal(in_place, multiply(x, weight, base))


def test_a_transposed_matrix_has_the_same_product(four_parts):
    x, weight, _, _ = matrices(3)
    assert torch.equal(multiply(x, weight), multiply(x, weight.t().contiguous().t()))


def test_a_result_in_float32_is_not_rounded(four_parts):
    x, weight, _, _ = matrices(3, torch.float16)
    found = multiply(x, weight, output=torch.empty(3, SIZE))
    assert (found - x.double() @ weight.double().t()).abs().max() < 1e-4


def test_bits_of_a_row_do_not_depend_on_the_others(four_parts, monkeypatch):
    """Nor on whether one program computes all parts of the inner dimension."""
    x, weight, base, _ = matrices(70)
    by_parts = multiply(x, weight, base)
    for row in (0, 15, 69):
        own = slice(row, row + 1)
        assert torch.equal(multiply(x[own], weight, base[own])[0], by_parts[row])
    monkeypatch.setattr(products, "_MOST_SPLIT_TILES", 0)
    assert torch.equal(multiply(x, weight, base), by_parts)
    monkeypatch.setattr(products, "num_parts_of", lambda size, inner: 1)
    assert not torch.equal(multiply(x, weight, base), by_parts)


@pytest.mark.parametrize("tile", [FEW_ROWS_TILE, MANY_ROWS_TILE, MAPPED_TILE, MAPPED_PARTS_TILE])
def test_every_tile_has_the_product_of_torch(four_parts, monkeypatch, tile):
    """Whose rows, columns and parts end within a tile; the map of x has rows that begin apart."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(70, 352, generator=generator).half()
    x, weight = wide[:, 8:336], torch.randn(SIZE, 328, generator=generator).half()
    base, split = torch.randn(SIZE, generator=generator).half(), torch.empty(70, SIZE).half()
    multiply_by_tiles(x, weight, base, split, tile)
    expected = x.double() @ weight.double().t() + base
    assert (split - expected).abs().max() < TOLERANCE[torch.float16]
    monkeypatch.setattr(products, "_MOST_SPLIT_TILES", 0)
    whole = torch.empty_like(split)
    multiply_by_tiles(x, weight, base, whole, tile)
    assert torch.equal(whole, split)


def test_the_tile_follows_from_rows_type_and_device(monkeypatch):
    x, weight = torch.zeros(65, 64).half(), torch.zeros(8, 64).half()
    assert tile_of(x[:64], weight) == FEW_ROWS_TILE
    assert tile_of(x, weight) == MANY_ROWS_TILE
    monkeypatch.setattr(products, "has_tensor_maps", lambda device: True)
    assert tile_of(x, weight) == MAPPED_TILE
    assert tile_of(torch.zeros(65, 1024).half(), torch.zeros(8, 1024).half()) == MAPPED_PARTS_TILE
    assert tile_of(x[:64], weight) == FEW_ROWS_TILE
    assert tile_of(x.float(), weight.float()).block_k == 32
    shifted = torch.zeros(8 * 64 + 1).half()[1:].view(8, 64)
    for odd in (torch.zeros(8, 68).half()[:, :64], torch.zeros(64, 8).half().t(), shifted):
        assert tile_of(x, odd) == MANY_ROWS_TILE


def test_parts_follow_from_the_matrix_alone():
    assert num_parts_of(128_256, 4096) == 1
    assert num_parts_of(4096, 14_336) == 4
    assert num_parts_of(4096, 4096) == 4
    assert num_parts_of(1024, 100) == 1


@pytest.mark.parametrize("num_rows", [1, 70])
def test_products_of_heads_are_those_of_torch(num_rows):
    """Rows and results may be parts of wider ones; bits depend on no other row."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(num_rows, 3, 40, generator=generator)
    weight, x = torch.randn(3, 34, 20, generator=generator), wide[..., 6:]
    output = torch.zeros(num_rows, 4, 24)
    multiply_heads(x, weight, output[:, :-1, 4:])
    expected = torch.einsum("thi,hio->tho", x.double(), weight.double())
    assert (output[:, :-1, 4:] - expected).abs().max() < TOLERANCE[torch.float32]
    assert not output[:, -1].any()
    assert not output[..., :4].any()
    alone = torch.zeros(1, 3, 20)
    multiply_heads(x[-1:], weight, alone)
    assert torch.equal(alone[0], output[-1, :-1, 4:])
