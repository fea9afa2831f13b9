"""Sampling of one token for each row of logits; `specdec.sampling.device` defines it.

A row is divided into tiles of BLOCK tokens. Scores, (logit - best logit) / temperature, are
computed from the logits wherever they are needed, and never stored.
"""

import triton
import triton.language as tl

from specdec.kernels.triton.device.gumbel import CHUNK_TOKENS, gumbel_noise

NO_TOKEN = tl.constexpr(2147483647)
_NEGATIVE_INFINITY = tl.constexpr(float("-inf"))
LOWEST = tl.constexpr(-3.4028234663852886e38)
ROW_COLUMNS = (
    "temperatures",
    "top_k",
    "top_p",
    "min_scores",
    "floors",
    "seeds",
    "choices",
    "positions",
)
"""Arguments with one value for each row. Those of one row may begin at any address, for which a
kernel would be compiled again."""


@triton.jit
def load_logits(logits, tokens, vocab_size):
    """Return logits in float32; NaN, and tokens beyond the vocabulary, are -inf."""
    values = tl.load(logits + tokens, mask=tokens < vocab_size, other=float("-inf"))
    values = values.to(tl.float32)
    return tl.where(values == values, values, _NEGATIVE_INFINITY)


@triton.jit
def tile_argmax(
    logits,  # [R, vocab_size], rows `stride` apart
    best,  # output [R, num_tiles] float32
    best_ids,  # output [R, num_tiles] int32, the first token with the best logit
    is_invalid,  # output [R, num_tiles] int32: NaN or +inf
    stride,
    vocab_size,
    num_tiles,
    BLOCK: tl.constexpr,
):
    """Write the best logit of each tile; grid (R, num_tiles)."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = tile * BLOCK + tl.arange(0, BLOCK)
    raw = tl.load(logits + row * stride + tokens, mask=tokens < vocab_size, other=float("-inf"))
    raw = raw.to(tl.float32)
    is_bad = (raw != raw) | (raw == float("inf"))
    values = tl.where(raw == raw, raw, _NEGATIVE_INFINITY)
    highest = tl.max(values, 0)
    at = row * num_tiles + tile
    tl.store(best + at, highest)
    tl.store(best_ids + at, tl.min(tl.where(values == highest, tokens, NO_TOKEN), 0))
    tl.store(is_invalid + at, tl.max(is_bad.to(tl.int32), 0))


@triton.jit
def row_argmax(
    best,  # [R, num_tiles] float32
    best_ids,  # [R, num_tiles] int32
    is_invalid,  # [R, num_tiles] int32
    row_best,  # output [R] float32
    token_ids,  # output [R] int64
    has_nan,  # output [R] int32
    vocab_size,
    num_tiles,
    BLOCK_TILES: tl.constexpr,
):
    """Reduce the tiles of a row; of equal logits the lowest token wins; grid (R,)."""
    row = tl.program_id(0)
    tiles = tl.arange(0, BLOCK_TILES)
    at = row * num_tiles + tiles
    values = tl.load(best + at, mask=tiles < num_tiles, other=float("-inf"))
    ids = tl.load(best_ids + at, mask=tiles < num_tiles, other=NO_TOKEN)
    bad = tl.load(is_invalid + at, mask=tiles < num_tiles, other=0)
    highest = tl.max(values, 0)
    tl.store(row_best + row, highest)
    token_id = tl.min(tl.where(values == highest, ids, NO_TOKEN), 0)
    tl.store(token_ids + row, tl.minimum(token_id, vocab_size - 1).to(tl.int64))
    tl.store(has_nan + row, tl.max(bad, 0))


@triton.jit
def scores_of(logits, tokens, vocab_size, highest, temperature):
    """Return log(probability / probability of the best token) of tokens."""
    values = load_logits(logits, tokens, vocab_size)
    return tl.div_rn(values - highest, tl.zeros_like(values) + temperature)


@triton.jit(do_not_specialize_on_alignment=ROW_COLUMNS)
def perturbed_argmax(
    logits,  # [R, vocab_size], rows `stride` apart
    best,  # [R, num_tiles] float32, the best logit; replaced by score and noise of the winner
    best_ids,  # [R, num_tiles] int32; replaced by the winner
    row_best,  # [R] float32
    temperatures,  # [R] float32; 0 for a row that is not sampled
    floors,  # [R] float32
    seeds,  # [R] int64
    choices,  # [R] int64
    positions,  # [R] int64
    stride,
    vocab_size,
    num_tiles,
    least_floor,
    BLOCK: tl.constexpr,
):
    """Replace the best token of a tile by the best one with noise; grid (R, num_tiles).

    A row that is not sampled is left as it is. Tiles below the floor of their row, or so far below
    its best token that no noise lets them win, compute no noise.
    """
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        highest = tl.maximum(tl.load(row_best + row), LOWEST)
        at = row * num_tiles + tile
        floor = tl.maximum(tl.load(floors + row), least_floor)
        highest_here = tl.div_rn(tl.load(best + at) - highest, temperature)
        if highest_here >= floor:
            chunks: tl.constexpr = BLOCK // CHUNK_TOKENS
            first_chunk = tile * chunks
            ids = (first_chunk + tl.arange(0, chunks))[:, None] * CHUNK_TOKENS
            tokens = ids + tl.arange(0, CHUNK_TOKENS)[None, :]
            scores = scores_of(logits + row * stride, tokens, vocab_size, highest, temperature)
            seed, choice = tl.load(seeds + row), tl.load(choices + row)
            noise = gumbel_noise(first_chunk, seed, choice, tl.load(positions + row), chunks)
            perturbed = tl.where(scores >= floor, scores + noise, _NEGATIVE_INFINITY)
            winner = tl.max(tl.max(perturbed, 1), 0)
            ids = tl.where(perturbed == winner, tokens, NO_TOKEN)
            tl.store(best + at, winner)
            tl.store(best_ids + at, tl.min(tl.min(ids, 1), 0))
        else:
            tl.store(best + at, _NEGATIVE_INFINITY)
            tl.store(best_ids + at, NO_TOKEN)
