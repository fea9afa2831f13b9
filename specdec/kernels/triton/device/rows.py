"""Kernels of whole rows between two matrix products; one program computes one row."""

import triton
import triton.language as tl

_SMALLEST = tl.constexpr(1.1754943508222875e-38)  # the smallest normal float32
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, ties to even


@triton.jit
def rms_norm(
    x,  # [T, SIZE], rows `x_stride` apart
    residual,  # [T, SIZE]; unused unless ADDS
    weight,  # [SIZE]
    total,  # output [T, SIZE]: residual + x where ADDS
    output,  # [T, SIZE]
    x_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Normalize a row, or the sum of it and the residual; grid (T,).

    The sum is rounded to its type before it is normalized, as if it had been read again.
    """
    token = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    is_read = places < SIZE
    values = tl.load(x + token * x_stride + places, mask=is_read, other=0.0).to(tl.float32)
    if ADDS:
        at = token * SIZE + places
        values += tl.load(residual + at, mask=is_read, other=0.0).to(tl.float32)
        values = values.to(total.dtype.element_ty)
        tl.store(total + at, values, mask=is_read)
        values = values.to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(values * values, 0) / SIZE + eps)
    weights = tl.load(weight + places, mask=is_read, other=0.0).to(tl.float32)
    tl.store(output + token * SIZE + places, values * scale * weights, mask=is_read)


@triton.jit
def silu_mul(
    gate_up,  # [T, 2, size], rows `stride` apart
    output,  # [T, size]
    stride,
    size,
    BLOCK: tl.constexpr,
):
    """Write silu(gate) * up for BLOCK units of a row; grid (T, ceil(size / BLOCK))."""
    token = tl.program_id(0).to(tl.int64)
    units = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_read = units < size
    gate = tl.load(gate_up + token * stride + units, mask=is_read, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * stride + size + units, mask=is_read, other=0.0).to(tl.float32)
    tl.store(output + token * size + units, gate / (1 + tl.exp(-gate)) * up, mask=is_read)


@triton.jit
def quantize_row(
    x,  # [T, SIZE], rows `stride` apart
    quantized,  # [T, SIZE] int8 or float8
    scales,  # [T] float32
    stride,
    LARGEST: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Divide a row by its scale, which maps its largest magnitude to LARGEST; grid (T,).

    ROUNDS: to integers, ties to even; other types round when they are stored.
    """
    token = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    is_read = places < SIZE
    values = tl.load(x + token * stride + places, mask=is_read, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(values), 0), LARGEST), _SMALLEST)
    has_nan = tl.max((values != values).to(tl.int32), 0) > 0  # which the largest value may ignore
    scale = tl.where(has_nan, float("nan"), scale)
    values = tl.div_rn(values, tl.zeros([BLOCK], tl.float32) + scale)
    if ROUNDS:
        values = (values + _ROUNDER) - _ROUNDER
    values = tl.clamp(values, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(quantized + token * SIZE + places, values.to(quantized.dtype.element_ty), is_read)
    tl.store(scales + token, scale)
