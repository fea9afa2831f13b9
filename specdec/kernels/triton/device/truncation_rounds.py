"""Rounds of the search for the floors of truncation, in which all programs take part.

A key is the bits of -score as float32, so keys ascend as scores descend. Each round weighs the
tokens of a row up to NUM_THRESHOLDS keys, by tiles, and leaves the bracket between two of them. The
tokens of the last bracket are gathered; `device.truncation` finds the floor among them.

A weight is 1 for top_k and exp(score) for top_p. Weights are added in float32 in a tile, and in
float64 over tiles in their order, so a row does not depend on its batch.
"""

import triton
import triton.language as tl

from specdec.config.gpu import truncation_search
from specdec.kernels.triton.device.sample import LOWEST, ROW_COLUMNS, scores_of

NUM_THRESHOLDS = tl.constexpr(truncation_search.NUM_THRESHOLDS)
MAX_CANDIDATES = tl.constexpr(truncation_search.MAX_CANDIDATES)
KEY_OF_MINUS_INFINITY = tl.constexpr(0x7F800000)
_LEVELS = tl.constexpr(truncation_search.NUM_THRESHOLDS.bit_length() - 1)
_HALF_OCTAVE = tl.constexpr(1 << 22)
_LANES = tl.constexpr(256)
"""Threads of a program, for its layout."""


@triton.jit
def key_of(scores):
    """Return the keys of scores; above KEY_OF_MINUS_INFINITY for NaN."""
    return tl.abs(scores).to(tl.int32, bitcast=True)


@triton.jit
def score_of(keys):
    """Return the scores of keys."""
    return -(keys.to(tl.float32, bitcast=True))


@triton.jit
def keys_of_tiles(tile_best, row, num_tiles, highest, temperature, BLOCK_TILES: tl.constexpr):
    """Return the keys of the best tokens of a row's tiles, [BLOCK_TILES]."""
    tiles = tl.arange(0, BLOCK_TILES)
    at = tile_best + row * num_tiles + tiles
    best = tl.load(at, mask=tiles < num_tiles, other=float("-inf"))
    return key_of(tl.div_rn(best - highest, tl.zeros_like(best) + temperature))


@triton.jit
def limit_of_count(top_k, row, vocab_size):
    """Return top_k of a row, 0 where it keeps every token."""
    count = tl.load(top_k + row)
    return tl.where(count < vocab_size, count, 0)


@triton.jit
def _num_better(tile_keys):
    """Return the number of better tiles of each tile."""
    return tl.sum((tile_keys[None, :] < tile_keys[:, None]).to(tl.int32), 1)


@triton.jit
def _last_key(tile_keys, num_tiles, count, least_score):
    """Return a key that the floor does not exceed, if enough finite scores reach `least_score`.

    Of at least `count` tiles, the `count` best ones have that many tokens as good as their worst.
    """
    counted = tl.max(tl.where(_num_better(tile_keys) < count, tile_keys, 0), 0)
    last = tl.minimum(KEY_OF_MINUS_INFINITY - 1, key_of(least_score))
    is_bound = (count > 0) & (count <= num_tiles)
    return tl.where(is_bound, tl.minimum(counted, last), last)


@triton.jit
def _first_scale(tile_keys):
    """Return the scale of the first round: a key, and the step from it to the next threshold.

    Thresholds are half an octave apart, eight octaves around the median tile of those with a finite
    score, which measures the spread of the row's scores at any temperature.
    """
    half: tl.constexpr = NUM_THRESHOLDS // 2
    is_finite = tile_keys < KEY_OF_MINUS_INFINITY
    is_better_half = _num_better(tile_keys) <= tl.sum(is_finite.to(tl.int32), 0) // 2
    median = tl.max(tl.where(is_finite & is_better_half, tile_keys, 0), 0)
    middle = tl.minimum(median, KEY_OF_MINUS_INFINITY - half * _HALF_OCTAVE)
    return middle - (half + 1) * _HALF_OCTAVE, tl.full((), _HALF_OCTAVE, tl.int32)


@triton.jit
def scale_of(above, last):
    """Return the scale of a later round, which divides the bracket evenly."""
    return above, (last - above + (NUM_THRESHOLDS - 1)) // NUM_THRESHOLDS


@triton.jit
def _thresholds(low, step, last, places):
    """Return the thresholds at some places of a scale, ascending to `last`."""
    keys = tl.minimum(low + step * (places + 1), last)
    return tl.where(places < NUM_THRESHOLDS - 1, keys, last)


@triton.jit
def _total_weights(partials, tile_keys, last, num_tiles, BLOCK_TILES: tl.constexpr):
    """Return the weights of a row up to each threshold, [NUM_THRESHOLDS] float64.

    partials: of the row. Tiles without a key up to `last` have written none.
    """
    tiles, places = tl.arange(0, BLOCK_TILES), tl.arange(0, NUM_THRESHOLDS)
    is_read = (tile_keys <= last) & (tiles < num_tiles)
    at = tiles[:, None] * NUM_THRESHOLDS + places[None, :]
    return tl.sum(tl.load(partials + at, mask=is_read[:, None], other=0.0).to(tl.float64), 0)


@triton.jit
def narrow(totals, low, step, above, last, weight_above, target):
    """Return the bracket of the first threshold that weighs `target`, or of the last one.

    A bracket is the last key before it, its own last key, and the weight of the keys before it.
    """
    places = tl.arange(0, NUM_THRESHOLDS)
    is_reached = (totals >= target) | (places == NUM_THRESHOLDS - 1)
    place = tl.min(tl.where(is_reached, places, NUM_THRESHOLDS), 0)
    weight = tl.sum(tl.where(places == place - 1, totals, 0.0), 0)
    before = tl.where(place > 0, _thresholds(low, step, last, place - 1), above)
    reached = tl.maximum(_thresholds(low, step, last, place), 0)
    return tl.maximum(before, above), reached, tl.where(place > 0, weight, weight_above)


@triton.jit
def _next_bracket(
    above_keys,  # [2, R] int32, of even and odd rounds, like all others but `targets`
    last_keys,  # [2, R] int32
    weights_above,  # [2, R] float64
    targets,  # [R] float64, written in the second round
    partials,  # [2, R, num_tiles, NUM_THRESHOLDS] float32
    tile_keys,
    row,
    num_tiles,
    count,
    share,
    ROUND: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """Return the bracket that ROUND has left, and the weight to reach."""
    own = ROUND % 2 * tl.num_programs(0) + row
    above, last = tl.load(above_keys + own), tl.load(last_keys + own)
    parts = partials + own * num_tiles * NUM_THRESHOLDS
    totals = _total_weights(parts, tile_keys, last, num_tiles, BLOCK_TILES)
    if ROUND == 0:
        low, step = _first_scale(tile_keys)
        target = tl.where(count > 0, count.to(tl.float64), share * tl.max(totals, 0))
    else:
        low, step = scale_of(above, last)
        target = tl.load(targets + row)
    weight = tl.load(weights_above + own)
    above, last, weight = narrow(totals, low, step, above, last, weight, target)
    return above, last, weight, target


@triton.jit
def weigh_tile(
    logits, tile, vocab_size, highest, temperature, low, step, last, is_count, BLOCK: tl.constexpr
):
    """Return the weights of a tile's tokens up to each threshold, [NUM_THRESHOLDS] float32.

    Each thread has its own tokens and adds their weights for one threshold after the other. The
    sums are joined before threads exchange them, which is then done once for all thresholds.
    """
    rows: tl.constexpr = BLOCK // _LANES
    tokens = tl.arange(0, rows)[:, None] * _LANES + tl.arange(0, _LANES)[None, :]
    scores = scores_of(logits, tile * BLOCK + tokens, vocab_size, highest, temperature)
    keys, weights = key_of(scores), tl.where(is_count, 1.0, tl.exp(scores))
    sums = ()
    for place in tl.static_range(NUM_THRESHOLDS - 1):
        is_within = keys <= tl.minimum(low + step * (place + 1), last)
        sums += (tl.sum(tl.where(is_within, weights, 0.0), 0),)
    sums += (tl.sum(tl.where(keys <= last, weights, 0.0), 0),)
    for level in tl.static_range(_LEVELS):
        joined = ()
        for place in tl.static_range(NUM_THRESHOLDS >> (level + 1)):
            after = sums[place + (NUM_THRESHOLDS >> (level + 1))]
            joined += (tl.join(sums[place], after),)
        sums = joined
    return tl.reshape(tl.sum(sums[0], 0), [NUM_THRESHOLDS])


@triton.jit(do_not_specialize_on_alignment=ROW_COLUMNS)
def narrow_floors(
    logits,  # [R, vocab_size], rows `stride` apart
    tile_best,  # [R, num_tiles] float32
    row_best,  # [R] float32
    temperatures,  # [R] float32; 0 for a row that is not sampled
    top_k,  # [R] integers; 0 for no limit
    top_p,  # [R] float64; 1 for no limit
    min_scores,  # [R] float32, log(min_p); -inf for no limit
    above_keys,  # [2, R] int32, of even and odd rounds: the last key before the bracket
    last_keys,  # [2, R] int32, the last key of the bracket
    weights_above,  # [2, R] float64, of the keys before the bracket
    targets,  # [R] float64
    partials,  # [2, R, num_tiles, NUM_THRESHOLDS] float32
    num_candidates,  # output [R] int32: 0
    stride,
    vocab_size,
    num_tiles,
    ROUND: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """Weigh the tokens up to the thresholds of a round, by tiles; grid (R, programs of a row)."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    count, share = limit_of_count(top_k, row, vocab_size), tl.load(top_p + row)
    if (temperature > 0) & ((count > 0) | (share < 1)):
        highest = tl.maximum(tl.load(row_best + row), LOWEST)
        tile_keys = keys_of_tiles(tile_best, row, num_tiles, highest, temperature, BLOCK_TILES)
        if ROUND == 0:
            above, weight = tl.full((), -1, tl.int32), tl.full((), 0.0, tl.float64)
            last = _last_key(tile_keys, num_tiles, count, tl.load(min_scores + row))
            low, step = _first_scale(tile_keys)
        else:
            above, last, weight, target = _next_bracket(
                above_keys,
                last_keys,
                weights_above,
                targets,
                partials,
                tile_keys,
                row,
                num_tiles,
                count,
                share,
                ROUND - 1,
                BLOCK_TILES,
            )
            low, step = scale_of(above, last)
            if (ROUND == 1) & (split == 0):
                tl.store(targets + row, target)
        places, own = tl.arange(0, NUM_THRESHOLDS), ROUND % 2 * tl.num_programs(0) + row
        if split == 0:
            tl.store(above_keys + own, above)
            tl.store(last_keys + own, last)
            tl.store(weights_above + own, weight)
            tl.store(num_candidates + row, 0)
        tiles = tl.arange(0, BLOCK_TILES)
        is_read = (tile_keys <= last) & (tiles % tl.num_programs(1) == split)
        tile = tl.min(tl.where(is_read, tiles, BLOCK_TILES), 0)
        while tile < BLOCK_TILES:
            weights = weigh_tile(
                logits + row * stride,
                tile,
                vocab_size,
                highest,
                temperature,
                low,
                step,
                last,
                count > 0,
                BLOCK,
            )
            tl.store(partials + (own * num_tiles + tile) * NUM_THRESHOLDS + places, weights)
            tile = tl.min(tl.where(is_read & (tiles > tile), tiles, BLOCK_TILES), 0)


@triton.jit(do_not_specialize_on_alignment=ROW_COLUMNS)
def gather_candidates(
    logits,  # [R, vocab_size], rows `stride` apart
    tile_best,  # [R, num_tiles] float32
    row_best,  # [R] float32
    temperatures,  # [R] float32
    top_k,  # [R] integers
    top_p,  # [R] float64
    above_keys,  # [2, R] int32
    last_keys,  # [2, R] int32
    weights_above,  # [2, R] float64
    targets,  # [R] float64
    partials,  # [2, R, num_tiles, NUM_THRESHOLDS] float32
    candidates,  # output [R, MAX_CANDIDATES] int32, keys in any order
    num_candidates,  # output [R] int32, from 0; above MAX_CANDIDATES where they do not fit
    weights_before,  # output [R] float64, of the tokens before the candidates
    stride,
    vocab_size,
    num_tiles,
    ROUND: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """Write the tokens that ROUND has left, with top_k all before too; grid as `narrow_floors`."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    count, share = limit_of_count(top_k, row, vocab_size), tl.load(top_p + row)
    if (temperature > 0) & ((count > 0) | (share < 1)):
        highest = tl.maximum(tl.load(row_best + row), LOWEST)
        tile_keys = keys_of_tiles(tile_best, row, num_tiles, highest, temperature, BLOCK_TILES)
        above, last, weight, _ = _next_bracket(
            above_keys,
            last_keys,
            weights_above,
            targets,
            partials,
            tile_keys,
            row,
            num_tiles,
            count,
            share,
            ROUND,
            BLOCK_TILES,
        )
        above = tl.where(count > 0, -1, above)
        if split == 0:
            tl.store(weights_before + row, tl.where(count > 0, 0.0, weight))
        tiles = tl.arange(0, BLOCK_TILES)
        is_read = (tile_keys <= last) & (tiles % tl.num_programs(1) == split)
        tile = tl.min(tl.where(is_read, tiles, BLOCK_TILES), 0)
        while tile < BLOCK_TILES:
            tokens = tile * BLOCK + tl.arange(0, BLOCK)
            scores = scores_of(logits + row * stride, tokens, vocab_size, highest, temperature)
            keys = key_of(scores)
            is_candidate = ((keys > above) & (keys <= last)).to(tl.int32)
            num_here = tl.sum(is_candidate, 0)
            first = tl.atomic_add(num_candidates + row, num_here, sem="relaxed")
            places = first + tl.cumsum(is_candidate, 0) - 1
            is_kept = (is_candidate > 0) & (places < MAX_CANDIDATES)
            tl.store(candidates + row * MAX_CANDIDATES + places, keys, mask=is_kept)
            tile = tl.min(tl.where(is_read & (tiles > tile), tiles, BLOCK_TILES), 0)
