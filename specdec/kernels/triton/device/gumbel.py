"""Gumbel noise of chunks of 64 tokens, in registers; `specdec.sampling.gumbel` defines it.

The random bits are those of the reference. The logarithms are the ones of `logarithm`, which may
differ from torch's in the last place.
"""

import triton
import triton.language as tl

from specdec.kernels.triton.device.logarithm import exponential, log

CHUNK_TOKENS = tl.constexpr(64)
_CALLS_PER_CHUNK = tl.constexpr(16)
_FIRST_CHUNK_COUNTER = tl.constexpr(2147483648)
_OFFSET_SHIFT = tl.constexpr(26)
_TO_UNIT = tl.constexpr(2.0**-32)
_HALF_STEP = tl.constexpr(2.0**-33)
_LARGEST_UNIFORM = tl.constexpr(1 - 2.0**-24)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Return the four words of Philox4x32-10 (Salmon et al. 2011); arguments are uint32."""
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def exponentials_of_bits(bits):
    """Return the exponential variates of random words (uint32)."""
    uniform = bits.to(tl.float32) * _TO_UNIT + _HALF_STEP
    return exponential(tl.minimum(uniform, _LARGEST_UNIFORM))


@triton.jit
def gumbel_noise(first_chunk, seed, choice, position, NUM_CHUNKS: tl.constexpr):
    """Return the coupled noise of consecutive chunks, [NUM_CHUNKS, 64] float32.

    seed, choice, position: the key of the row, int64.
    """
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    choice, position = choice.to(tl.uint32), position.to(tl.uint32)
    chunks = first_chunk + tl.arange(0, NUM_CHUNKS)
    calls = chunks[:, None] * _CALLS_PER_CHUNK + tl.arange(0, _CALLS_PER_CHUNK)[None, :]
    zeros = tl.zeros([NUM_CHUNKS, _CALLS_PER_CHUNK], tl.uint32)
    w0, w1, w2, w3 = philox(
        calls.to(tl.uint32),
        zeros + position,
        zeros + choice,
        zeros,
        zeros + k0,
        zeros + k1,
    )
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # the last axis is the second one of a word
    bits = tl.reshape(words, [NUM_CHUNKS, CHUNK_TOKENS])
    zeros = tl.zeros([NUM_CHUNKS], tl.uint32)
    first, second, _, _ = philox(
        chunks.to(tl.uint32) + _FIRST_CHUNK_COUNTER,
        zeros + position,
        zeros + choice,
        zeros,
        zeros + k0,
        zeros + k1,
    )
    smallest = exponentials_of_bits(first) * (1.0 / CHUNK_TOKENS)
    offsets = (second >> _OFFSET_SHIFT).to(tl.int32)
    is_smallest = offsets[:, None] == tl.arange(0, CHUNK_TOKENS)[None, :]
    others = exponentials_of_bits(bits) + smallest[:, None]
    return -log(tl.where(is_smallest, smallest[:, None], others))
