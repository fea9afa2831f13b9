"""Logarithms in float32 from IEEE operations only.

`tl.log` is approximate on a GPU and numpy's in the interpreter; these have the same bits on every
GPU and in the interpreter, for kernels compiled with `enable_fp_fusion=False`. The reductions and
the polynomial are those of fdlibm's logf and log1pf (Sun Microsystems 1993, in FreeBSD's msun),
with an error below one unit in the last place.
"""

import triton
import triton.language as tl

_LN2_HI = tl.constexpr(6.9313812256e-01)
_LN2_LO = tl.constexpr(9.0580006145e-06)
_C1 = tl.constexpr(0.66666662693)
_C2 = tl.constexpr(0.40000972152)
_C3 = tl.constexpr(0.28498786688)
_C4 = tl.constexpr(0.24279078841)
_SQRT_HALF_BITS = tl.constexpr(0x3F3504F3)
_ONE_BITS = tl.constexpr(0x3F800000)
_MANTISSA = tl.constexpr(0x007FFFFF)


@triton.jit
def log(x):
    """Return the natural logarithm of x, a positive normal number."""
    bits = x.to(tl.int32, bitcast=True) + (_ONE_BITS - _SQRT_HALF_BITS)
    exponent = ((bits >> 23) - 127).to(tl.float32)
    reduced = ((bits & _MANTISSA) + _SQRT_HALF_BITS).to(tl.float32, bitcast=True)
    return _log_of(reduced - 1.0, exponent, 0.0)


@triton.jit
def exponential(uniform):
    """Return -log(1 - uniform) for 2^-33 <= uniform <= 1 - 2^-24, accurate where it is small."""
    rest = 1.0 - uniform
    bits = rest.to(tl.int32, bitcast=True) + (_ONE_BITS - _SQRT_HALF_BITS)
    exponent = ((bits >> 23) - 127).to(tl.float32)
    reduced = ((bits & _MANTISSA) + _SQRT_HALF_BITS).to(tl.float32, bitcast=True)
    lost = tl.div_rn(-uniform - (rest - 1.0), rest)  # what rounding `rest` has dropped
    is_small = exponent == 0.0
    fraction = tl.where(is_small, -uniform, reduced - 1.0)
    return -_log_of(fraction, exponent, tl.where(is_small, 0.0, lost))


@triton.jit
def _log_of(fraction, exponent, correction):
    """Return log(1 + fraction) + exponent * log(2) + correction, fraction in (-0.3, 0.42)."""
    s = tl.div_rn(fraction, 2.0 + fraction)
    z = s * s
    w = z * z
    series = z * (_C1 + w * _C3) + w * (_C2 + w * _C4)
    half_square = 0.5 * fraction * fraction
    low = exponent * _LN2_LO + correction
    return s * (half_square + series) + low - half_square + fraction + exponent * _LN2_HI
