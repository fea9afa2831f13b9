"""The best tokens of rows of logits with their confidences, which draft trees grow by.

`sampling.device.device_children` defines them. Scores are ordered as integers, their bits and then
those of the token, so that of equal scores the lower token comes first, and no two are equal.
"""

import triton
import triton.language as tl

from specdec.kernels.triton.device.gumbel import CHUNK_TOKENS, gumbel_noise
from specdec.kernels.triton.device.sample import load_logits

_NO_KEY = tl.constexpr(-(2**63))
_LOW_WORD = tl.constexpr(2**32 - 1)
_LOWEST = tl.constexpr(-3.4028234663852886e38)
_NEGATIVE_INFINITY = tl.constexpr(float("-inf"))
_COLUMNS = ("row_best", "temperatures", "floors", "seeds", "choices", "positions")
"""Arguments with one value for each row, which may begin at any address."""


@triton.jit
def _ordered(bits):
    """Return the bits of float32 numbers as integers of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _keys(scores, tokens, vocab_size):
    """Return scores with their tokens as integers of the same order."""
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)  # -0 is equal to 0
    keys = (_ordered(bits).to(tl.int64) << 32) + (_LOW_WORD - tokens.to(tl.int64))
    return tl.where(tokens < vocab_size, keys, _NO_KEY)


@triton.jit(do_not_specialize_on_alignment=_COLUMNS)
def tile_children(
    logits,  # [R, vocab_size], rows `stride` apart
    keys,  # output [R, num_tiles, COUNT] int64, descending
    sums,  # output [R, num_tiles] float32, of the exponentials of logits less the best of the tile
    row_best,  # [R] float32, like the next two only with NOISY
    temperatures,  # 0 for a row that is not sampled
    floors,
    seeds,  # [R] int64, like the next two only with NOISY
    choices,
    positions,
    stride,
    vocab_size,
    num_tiles,
    NOISY: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the best tokens of each tile, with the noise of their row; grid (R, num_tiles)."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunks: tl.constexpr = BLOCK // CHUNK_TOKENS
    first_chunk = tile * chunks
    ids = (first_chunk + tl.arange(0, chunks))[:, None] * CHUNK_TOKENS
    tokens = ids + tl.arange(0, CHUNK_TOKENS)[None, :]
    scores = load_logits(logits + row * stride, tokens, vocab_size)
    highest = tl.max(tl.max(scores, 1), 0)
    weights = tl.exp(scores - tl.maximum(highest, _LOWEST))
    tl.store(sums + row * num_tiles + tile, tl.sum(tl.sum(weights, 1), 0))
    if NOISY:
        temperature = tl.load(temperatures + row)
        if temperature > 0:
            best, floor = tl.maximum(tl.load(row_best + row), _LOWEST), tl.load(floors + row)
            scores = tl.div_rn(scores - best, tl.zeros_like(scores) + temperature)
            seed, choice = tl.load(seeds + row), tl.load(choices + row)
            noise = gumbel_noise(first_chunk, seed, choice, tl.load(positions + row), chunks)
            scores = tl.where(scores >= floor, scores + noise, _NEGATIVE_INFINITY)
    left = _keys(scores, tokens, vocab_size)
    out = keys + (row * num_tiles + tile) * COUNT
    for place in range(0, COUNT):
        largest = tl.max(tl.max(left, 1), 0)
        tl.store(out + place, largest)
        left = tl.where(left == largest, _NO_KEY, left)


@triton.jit(do_not_specialize_on_alignment=_COLUMNS)
def merge_children(
    keys,  # [R, num_tiles, COUNT] int64, descending
    sums,  # [R, num_tiles] float32
    tile_best,  # [R, num_tiles] float32, the best logit of each tile
    row_best,  # [R] float32
    is_invalid,  # [R] int32
    temperatures,  # [R] float32, only with NOISY
    token_ids,  # output [R, num_children] int64
    confidences,  # output [R, num_children] float64
    num_tiles,
    num_children,
    NOISY: tl.constexpr,
    COUNT: tl.constexpr,
    NUM_WEIGHED: tl.constexpr,
    BLOCK_COUNT: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """Write the best tokens of each row, and their confidences; grid (R,)."""
    row = tl.program_id(0).to(tl.int64)
    tiles, places = tl.arange(0, BLOCK_TILES), tl.arange(0, BLOCK_COUNT)
    lists = keys + (row * num_tiles + tiles) * COUNT
    heads = tl.load(lists, mask=tiles < num_tiles, other=_NO_KEY)
    index = tl.zeros([BLOCK_TILES], tl.int32)
    found = tl.full([BLOCK_COUNT], _NO_KEY, tl.int64)
    for place in range(0, COUNT):
        largest = tl.max(heads, 0)
        found = tl.where(places == place, largest, found)
        is_taken = (heads == largest) & (tiles < num_tiles)
        index += is_taken.to(tl.int32)
        next_heads = tl.load(lists + index, mask=is_taken & (index < COUNT), other=_NO_KEY)
        heads = tl.where(is_taken, next_heads, heads)
    is_found = found != _NO_KEY
    bits = _ordered((found >> 32).to(tl.int32))
    scores = tl.where(is_found, bits.to(tl.float32, bitcast=True), _NEGATIVE_INFINITY)
    wide, first = scores.to(tl.float64), tl.max(scores, 0)
    best = tl.maximum(tl.load(row_best + row), _LOWEST)
    bests = tl.load(tile_best + row * num_tiles + tiles, mask=tiles < num_tiles, other=_LOWEST)
    parts = tl.load(sums + row * num_tiles + tiles, mask=tiles < num_tiles, other=0.0)
    total = tl.log(tl.sum(parts * tl.exp(bests - best), 0)) + best
    values = tl.exp(tl.minimum(wide - total.to(tl.float64), 0.0))
    if NOISY:
        temperature = tl.load(temperatures + row).to(tl.float64)
        differences = wide - tl.maximum(first, _LOWEST).to(tl.float64)
        weights = tl.exp(differences * temperature)  # any number at temperature 0
        total = tl.sum(tl.where(places < NUM_WEIGHED, weights, 0.0), 0)
        weights = weights / tl.maximum(total, 1.0)
        values = tl.where(temperature > 0, weights, values)
    is_valid = (tl.load(is_invalid + row) == 0) & (first > _NEGATIVE_INFINITY)
    tokens = tl.where(is_found, _LOW_WORD - (found & _LOW_WORD), 0)
    out = row * num_children + places
    tl.store(token_ids + out, tokens, mask=places < num_children)
    tl.store(confidences + out, tl.where(is_valid & is_found, values, 0.0), places < num_children)
