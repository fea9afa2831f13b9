"""Floors of min_p, top_k and top_p; `specdec.sampling.truncation` defines them.

One program for each row searches the candidates that `device.truncation_rounds` has gathered, in
registers. Where they are more than it holds, it passes over the row until one key is left. Weights
of candidates are added as integers, since their order may change from one run to the next.
"""

import triton
import triton.language as tl

from specdec.kernels.triton.device.sample import LOWEST, ROW_COLUMNS
from specdec.kernels.triton.device.truncation_rounds import (
    KEY_OF_MINUS_INFINITY,
    MAX_CANDIDATES,
    NUM_THRESHOLDS,
    key_of,
    keys_of_tiles,
    limit_of_count,
    narrow,
    scale_of,
    score_of,
    weigh_tile,
)

_ALL_ROUNDS = tl.constexpr(8)
"""Rounds after which a bracket of all keys holds one: they divide it by more than 2 ** 31."""
_UNITS = tl.constexpr(2.0**48)
"""Units of the weight 1 in sums of integers, which MAX_CANDIDATES do not overflow."""


@triton.jit
def _first_key(keys, weights, weight_before, target):
    """Return the lowest key up to which the candidates weigh `target`.

    Where all weigh less, every bit is set. weights: integers. The search is bit by bit.
    """
    found = tl.full((), 0, tl.int32)
    step = tl.full((), 1 << 30, tl.int32)
    for _ in range(0, 31):
        candidate = found | (step - 1)
        units = tl.sum(tl.where(keys <= candidate, weights, 0), 0)
        weight = weight_before + units.to(tl.float64)
        found = tl.where(weight < target, found | step, found)
        step = step >> 1
    return found


@triton.jit
def _floor_of_candidates(candidates, num_candidates, count, share, weight_before, target, floor):
    """Return the floor of a row, of which the candidates are in `candidates`.

    floor: that of min_p, which is the result where no more tokens are cut.
    """
    places = tl.arange(0, MAX_CANDIDATES)
    is_candidate = places < num_candidates
    keys = tl.load(candidates + places, mask=is_candidate, other=KEY_OF_MINUS_INFINITY)
    if count > 0:
        counted = _first_key(keys, is_candidate.to(tl.int64), 0.0, count.to(tl.float64))
        is_candidate = is_candidate & (keys <= counted)
        if counted < KEY_OF_MINUS_INFINITY:
            floor = score_of(counted)
    if share < 1:
        masses = (tl.exp(score_of(keys)) * _UNITS).to(tl.int64)
        masses = tl.where(is_candidate, masses, 0)
        if count > 0:
            target = share * tl.sum(masses, 0).to(tl.float64)
        else:
            target *= _UNITS
        covered = _first_key(keys, masses, weight_before * _UNITS, target)
        # Rounding of sums may leave all candidates below the target.
        worst = tl.max(tl.where(is_candidate, keys, 0), 0)
        floor = score_of(tl.minimum(covered, worst))
    return floor


@triton.jit
def _weigh_row(
    logits,
    tile_keys,  # [BLOCK_TILES]
    vocab_size,
    highest,
    temperature,
    low,
    step,
    last,
    is_count,
    BLOCK: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """Return the weights of a row's tokens up to each threshold, [NUM_THRESHOLDS] float64."""
    tiles = tl.arange(0, BLOCK_TILES)
    is_read = tile_keys <= last
    totals = tl.zeros([NUM_THRESHOLDS], tl.float64)
    tile = tl.min(tl.where(is_read, tiles, BLOCK_TILES), 0)
    while tile < BLOCK_TILES:
        weights = weigh_tile(
            logits,
            tile,
            vocab_size,
            highest,
            temperature,
            low,
            step,
            last,
            is_count,
            BLOCK,
        )
        totals += weights.to(tl.float64)
        tile = tl.min(tl.where(is_read & (tiles > tile), tiles, BLOCK_TILES), 0)
    return totals


@triton.jit
def _first_key_of_row(
    logits,
    tile_keys,  # [BLOCK_TILES]
    vocab_size,
    highest,
    temperature,
    last,
    limit,
    IS_COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """Return the lowest key up to which a row's tokens weigh what `limit` demands, at most `last`.

    limit: a number of tokens, or a share of the mass of those up to `last`.
    """
    above, weight = tl.full((), -1, tl.int32), tl.full((), 0.0, tl.float64)
    target = limit
    for turn in range(0, _ALL_ROUNDS):
        low, step = scale_of(above, last)
        totals = _weigh_row(
            logits,
            tile_keys,
            vocab_size,
            highest,
            temperature,
            low,
            step,
            last,
            IS_COUNT,
            BLOCK,
            BLOCK_TILES,
        )
        if (turn == 0) & (not IS_COUNT):
            target = limit * tl.max(totals, 0)
        above, last, weight = narrow(totals, low, step, above, last, weight, target)
    return last


@triton.jit
def _floor_of_row(
    logits,
    tile_keys,  # [BLOCK_TILES]
    vocab_size,
    highest,
    temperature,
    count,
    share,
    least_score,
    BLOCK: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """Return the floor of a row with any number of candidates, in passes over the row."""
    last = tl.minimum(KEY_OF_MINUS_INFINITY - 1, key_of(least_score))
    if count > 0:
        last = _first_key_of_row(
            logits,
            tile_keys,
            vocab_size,
            highest,
            temperature,
            last,
            count.to(tl.float64),
            True,
            BLOCK,
            BLOCK_TILES,
        )
    if share < 1:
        last = _first_key_of_row(
            logits,
            tile_keys,
            vocab_size,
            highest,
            temperature,
            last,
            share,
            False,
            BLOCK,
            BLOCK_TILES,
        )
    return score_of(last)


@triton.jit(do_not_specialize_on_alignment=ROW_COLUMNS)
def truncation_floors(
    logits,  # [R, vocab_size], rows `stride` apart
    tile_best,  # [R, num_tiles] float32
    row_best,  # [R] float32
    temperatures,  # [R] float32
    top_k,  # [R] integers
    top_p,  # [R] float64
    min_scores,  # [R] float32
    targets,  # [R] float64
    candidates,  # [R, MAX_CANDIDATES] int32
    num_candidates,  # [R] int32
    weights_before,  # [R] float64
    floors,  # output [R] float32
    stride,
    vocab_size,
    num_tiles,
    BLOCK: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """Write the lowest score of a row that passes min_p, top_k and then top_p; grid (R,).

    Equal scores are kept or removed together. Rows that are not sampled have -inf.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    floor = tl.full((), float("-inf"), tl.float32)
    if temperature > 0:
        floor = tl.load(min_scores + row)
        count, share = limit_of_count(top_k, row, vocab_size), tl.load(top_p + row)
        if (count > 0) | (share < 1):
            num_found = tl.load(num_candidates + row)
            if num_found <= MAX_CANDIDATES:
                floor = _floor_of_candidates(
                    candidates + row * MAX_CANDIDATES,
                    num_found,
                    count,
                    share,
                    tl.load(weights_before + row),
                    tl.load(targets + row),
                    floor,
                )
            else:
                highest = tl.maximum(tl.load(row_best + row), LOWEST)
                tile_keys = keys_of_tiles(
                    tile_best, row, num_tiles, highest, temperature, BLOCK_TILES
                )
                floor = _floor_of_row(
                    logits + row * stride,
                    tile_keys,
                    vocab_size,
                    highest,
                    temperature,
                    count,
                    share,
                    floor,
                    BLOCK,
                    BLOCK_TILES,
                )
    tl.store(floors + row, floor)
