"""Packed matrix products: accuracy, and equal bits in every batch."""

import platform
from pathlib import Path

import pytest
import torch

from specdec.kernels.cpu import MatrixFormat, PackedMatrix, native_library
from specdec.kernels.cpu.build import SOURCE
from specdec.models.layers.matrix import quantize_rows
from tests.specdec.kernels.cpu.compiling import compiled
from tests.specdec.threads import num_threads, threads_started_by

FLOATS = {
    MatrixFormat.FLOAT32: torch.float32,
    MatrixFormat.BFLOAT16: torch.bfloat16,
    MatrixFormat.FLOAT16: torch.float16,
    MatrixFormat.SHORT_FLOAT32: torch.bfloat16,
}
RELATIVE_STEPS = {MatrixFormat.INT8: 1 / 254, MatrixFormat.W8A8: 1.0}
"""Quantization step of activations, relative to 1/127 of the largest one with the same scale."""

W8A8_GROUP = 64
"""Inputs of a row that share a scale; in INT8 all inputs do."""

SHAPES = [(1, 1), (7, 5), (5, 6), (48, 64), (20, 131), (100, 576), (33, 1536), (300, 2100)]
"""[out, in]: boundaries of panels, panel groups, quads, and groups and blocks of inputs."""

CASES = [
    (weights, shape)
    for weights in MatrixFormat
    for shape in SHAPES
    if weights != MatrixFormat.SHORT_FLOAT32 or shape[1] % 2 == 0
]

MOST_ROWS = 70


def random_tensor(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(weights, shape, library=None):
    """Return a random packed matrix, and its weights in float64."""
    matrix = PackedMatrix(library or native_library(), weights, shape)
    values = random_tensor(*shape)
    if weights in FLOATS:
        values = values.to(FLOATS[weights])
        matrix.pack(0, values)
        return matrix, values.double()
    integers, scales = quantize_rows(values)
    matrix.pack(0, integers, scales)
    return matrix, integers.double() * scales.double()[:, None]


def max_of_group(x, group):
    """Return, for each input, the largest magnitude in its group of `group` inputs."""
    return torch.cat(
        [part.abs().amax(1, keepdim=True).expand_as(part) for part in x.split(group, dim=1)], dim=1
    )


def product(matrix, x, base=None):
    y = torch.full((len(x), matrix.shape[0]), float("nan")) if base is None else base.clone()
    matrix.multiply(x, y, adds=base is not None)
    return y


@pytest.mark.parametrize(("weights", "shape"), [case for case in CASES if case[0] in FLOATS])
def test_floating_point_products(weights, shape):
    matrix, values = packed(weights, shape)
    x, base = random_tensor(MOST_ROWS, shape[1], seed=1), random_tensor(MOST_ROWS, shape[0], seed=2)
    if weights == MatrixFormat.BFLOAT16:
        x = x.to(torch.bfloat16).float()
    expected = x.double() @ values.t()
    # Each sum rounds at most once per input, by 2^-24 of its value.
    magnitudes = x.abs().double() @ values.abs().t()
    limit = 2**-24 * (shape[1] + 1) * magnitudes + 2**-23 * base.abs()
    assert ((product(matrix, x) - expected).abs() <= limit).all()
    assert ((product(matrix, x, base) - (expected + base)).abs() <= limit).all()


@pytest.mark.parametrize("short", [MatrixFormat.SHORT_FLOAT32, MatrixFormat.FLOAT16])
def test_float32_stored_in_16_bits_gives_the_same_bits(short):
    for shape in (shape for weights, shape in CASES if weights == MatrixFormat.SHORT_FLOAT32):
        values = random_tensor(*shape).to(FLOATS[short])
        values[0, 0], values[-1, -1], values[-1, 0] = torch.inf, torch.nan, 0
        of_32, of_16 = (
            PackedMatrix(native_library(), weights, shape)
            for weights in (MatrixFormat.FLOAT32, short)
        )
        of_32.pack(0, values.float())
        of_16.pack(0, values)
        x = random_tensor(MOST_ROWS, shape[1], seed=1)
        base = random_tensor(MOST_ROWS, shape[0], seed=2)
        for count in (1, 4, MOST_ROWS):
            assert same_bits(product(of_16, x[:count]), product(of_32, x[:count]))
            added = product(of_32, x[:count], base[:count])
            assert same_bits(product(of_16, x[:count], base[:count]), added)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weights", RELATIVE_STEPS)
def test_int8_products(weights, shape):
    matrix, values = packed(weights, shape)
    x, base = random_tensor(MOST_ROWS, shape[1], seed=1), random_tensor(MOST_ROWS, shape[0], seed=2)
    x[:, 0] *= 30
    expected = x.double() @ values.t()
    steps = max_of_group(x, shape[1] if weights == MatrixFormat.INT8 else W8A8_GROUP) / 127
    # Half a step for each input, and the rounding error of float32.
    limit = 0.501 * RELATIVE_STEPS[weights] * (steps.double() @ values.abs().t())
    limit += 1e-6 * (expected.abs() + base.abs())
    assert ((product(matrix, x) - expected).abs() <= limit).all()
    assert ((product(matrix, x, base) - (expected + base)).abs() <= limit).all()


def int8_definition(x, integers, scales):
    """Return the products of docs/adr/0007 in `int8`, in the roundings of the kernels."""
    of_rows = (x.abs().amax(1, keepdim=True) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    exact = x * (1 / of_rows)
    hi = exact.round()
    activations = (254 * hi + (254 * (exact - hi)).round()).to(torch.int64)
    sums = activations @ integers.to(torch.int64).t()
    # The exact sum is rounded in two parts, so that no processor needs more than 32 bits.
    total = ((sums >> 8).float().double() * 256 + (sums & 255)).float()
    return total * torch.tensor(1 / 254) * of_rows * scales


@pytest.mark.parametrize("largest", [False, True], ids=["random", "largest"])
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_products_are_exact_sums_on_every_processor(shape, largest):
    integers, scales = quantize_rows(random_tensor(*shape))
    x = random_tensor(MOST_ROWS, shape[1], seed=1)
    if largest:  # sums that need more than 32 bits, of each sign
        integers = (
            torch.where(random_tensor(shape[0], 1) < 0, -127, 127).expand(shape).to(torch.int8)
        )
        x = x.sign() if shape[0] % 2 else torch.ones_like(x)
    matrix = PackedMatrix(native_library(), MatrixFormat.INT8, shape)
    matrix.pack(0, integers, scales)
    assert same_bits(product(matrix, x), int8_definition(x, integers, scales))


@pytest.mark.parametrize(("weights", "shape"), CASES)
def test_row_does_not_depend_on_batch(weights, shape):
    matrix, _ = packed(weights, shape)
    x, base = random_tensor(MOST_ROWS, shape[1], seed=1), random_tensor(MOST_ROWS, shape[0], seed=2)
    x[3] *= 1000
    alone = torch.cat([product(matrix, row[None]) for row in x])
    added = torch.cat([product(matrix, row[None], b[None]) for row, b in zip(x, base, strict=True)])
    for count in range(1, MOST_ROWS + 1):
        first = (7 * count) % (MOST_ROWS - count + 1)
        part = slice(first, first + count)
        assert torch.equal(product(matrix, x[part]), alone[part])
        assert torch.equal(product(matrix, x[part], base[part]), added[part])


@pytest.mark.parametrize("panels", [1, 2, 3, 4, 5, 7, 63])
@pytest.mark.parametrize("weights", MatrixFormat)
def test_row_depends_on_neither_threads_nor_panels_of_a_tile(weights, panels):
    matrix, _ = packed(weights, (16 * panels - 8, 1100))
    x, base = random_tensor(33, 1100, seed=1), random_tensor(33, matrix.shape[0], seed=2)
    expected, added = product(matrix, x), product(matrix, x, base)
    for count in (1, 2, 3, 5):
        with num_threads(count):
            for rows in (1, 2, 3, 4, 7, 33):
                assert torch.equal(product(matrix, x[:rows]), expected[:rows])
                assert torch.equal(product(matrix, x[:rows], base[:rows]), added[:rows])


@pytest.mark.parametrize("weights", MatrixFormat)
def test_strided_rows(weights):
    matrix, _ = packed(weights, (100, 576))
    wide = random_tensor(9, 700, seed=1)
    x = wide[:, 3:579]
    target = torch.full((9, 120), 5.0)
    matrix.multiply(x, target[:, 7:107])
    assert torch.equal(target[:, 7:107], product(matrix, x.contiguous()))
    assert (target[:, :7] == 5).all()
    assert (target[:, 107:] == 5).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("weights", MatrixFormat)
def test_non_finite_row_affects_no_other_row(weights, bad):
    matrix, _ = packed(weights, (100, 576))
    x = random_tensor(9, 576, seed=1)
    expected = product(matrix, x)
    x[4, 7] = bad
    found = product(matrix, x)
    assert not found[4].isfinite().any()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("weights", MatrixFormat)
def test_packing_in_blocks_gives_the_same_matrix(weights):
    whole, values = packed(weights, (100, 64))
    pieces = PackedMatrix(native_library(), weights, (100, 64))
    integers, scales = quantize_rows(random_tensor(100, 64))
    for rows in torch.arange(100).split([1, 3, 40, 56]):
        if weights in FLOATS:
            pieces.pack(int(rows[0]), values[rows].to(FLOATS[weights]))
        else:
            pieces.pack(int(rows[0]), integers[rows], scales[rows])
    x = random_tensor(5, 64, seed=1)
    assert torch.equal(product(pieces, x), product(whole, x))


def test_packing_in_a_new_thread_uses_as_many_threads_as_torch():
    matrix = PackedMatrix(native_library(), MatrixFormat.FLOAT32, (300, 64))
    values = random_tensor(300, 64)
    with num_threads(3):
        assert len(threads_started_by(lambda: matrix.pack(0, values))) == 2, "beside the new thread"


@pytest.fixture(scope="module")
def library_for():
    """Compile the GEMM kernels for another processor of this architecture."""
    units = list((SOURCE / "gemm").glob("*.cpp"))
    return lambda processor: compiled(units, f"-march={processor}")


OLDER_PROCESSORS = [
    *(("x86-64-v3", weights) for weights in MatrixFormat),  # AVX2, no AVX-512
    ("x86-64", MatrixFormat.BFLOAT16),  # no fused multiply-adds, but exact products
]
INSTRUCTIONS = {
    "avx2": "the libraries for older processors do not run on this one",
    "avx512_bf16": "the same kernel is compiled for this processor",
}
"""CPU flags that the comparison needs, and the reason to skip without them."""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="another instruction set")
@pytest.mark.parametrize(("processor", "weights"), OLDER_PROCESSORS)
def test_products_are_the_same_bits_on_older_processors(processor, weights, library_for):
    flags = Path("/proc/cpuinfo").read_text().split()
    for name, reason in INSTRUCTIONS.items():
        if name not in flags and (name == "avx2" or weights == MatrixFormat.BFLOAT16):
            pytest.skip(reason)
    older = library_for(processor)
    for shape in (shape for of_case, shape in CASES if of_case == weights):
        (here, _), (there, _) = packed(weights, shape), packed(weights, shape, older)
        x, base = random_tensor(MOST_ROWS, shape[1], seed=1), random_tensor(MOST_ROWS, shape[0])
        x[3] *= 1e30
        x[4] *= 1e-30
        x[5, 0] = torch.inf
        for rows in (1, 2, 4, 8, 12, MOST_ROWS):
            few, sums = x[:rows], base[:rows]
            assert same_bits(product(there, few), product(here, few))
            assert same_bits(product(there, few, sums), product(here, few, sums))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="another instruction set")
def test_float16_on_processor_without_conversion(library_for):
    values = [1.5, 0.0, torch.inf, -torch.inf, torch.nan, 65504.0, 2**-14, 2**-24, -(2**-20)]
    column = torch.tensor(values, dtype=torch.float16)[:, None]
    matrix = PackedMatrix(library_for("x86-64"), MatrixFormat.FLOAT16, (len(values), 1))
    matrix.pack(0, column)
    assert same_bits(product(matrix, torch.ones(1, 1)), column.float().t())


def same_bits(a, b):
    """Compare float32 bits, including the signs of zeros; all NaN are equal."""
    bits = (each.masked_fill(each.isnan(), torch.nan).view(torch.int32) for each in (a, b))
    return torch.equal(*bits)
