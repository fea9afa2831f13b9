"""Penalties and token masks of rows of logits; `sampling.device.device_edits` defines them."""

import triton
import triton.language as tl

from specdec.kernels.reference.logit_edits import PROMPT_TOKEN, Change

_ROW = tl.constexpr(int(Change.ROW))
_PLACE = tl.constexpr(int(Change.PLACE))
_MASK = tl.constexpr(int(Change.MASK))
_REPETITION = tl.constexpr(int(Change.REPETITION))
_FREQUENCY = tl.constexpr(int(Change.FREQUENCY))
_PRESENCE = tl.constexpr(int(Change.PRESENCE))
_NUM_WORDS = tl.constexpr(len(Change))
_COUNT_BITS = tl.constexpr(PROMPT_TOKEN - 1)


@triton.jit(do_not_specialize=["num_drafts", "first_token", "num_words"])
def edit_rows(
    logits,  # [R, num_tokens] float32, rows `stride` apart
    changes,  # [C, len(Change)] int64
    penalties,  # the same words as float64
    masks,  # [M, num_words] int32
    seen,  # [num_places, num_tokens] int32
    paths,  # [C, num_drafts] int64, tokens; -1 for none
    stride,
    num_tokens,
    num_drafts,
    first_token,
    num_words,
    BLOCK: tl.constexpr,
):
    """Change a tile of a row; grid (C, ceil(num_tokens / BLOCK)).

    A masked token is -inf, but NaN and +inf stay.
    """
    change = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_held = columns < num_tokens
    changes += change * _NUM_WORDS
    penalties += change * _NUM_WORDS
    logits += tl.load(changes + _ROW) * stride + columns
    values = tl.load(logits, mask=is_held, other=0.0)
    is_faulty = (values != values) | (values == float("inf"))
    place, mask = tl.load(changes + _PLACE), tl.load(changes + _MASK)
    if place >= 0:
        counts = tl.load(seen + place * num_tokens + columns, mask=is_held, other=0)
        paths += change * num_drafts
        for index in range(0, num_drafts):
            counts += (tl.load(paths + index) - first_token == columns).to(tl.int32)
        num_output = (counts & _COUNT_BITS).to(tl.float64)
        amounts = tl.load(penalties + _FREQUENCY) * num_output
        presence = tl.load(penalties + _PRESENCE)
        amounts += tl.where(num_output > 0, presence, tl.zeros_like(num_output))
        factors = tl.zeros_like(values) + tl.load(penalties + _REPETITION).to(tl.float32)
        changed = tl.where(values > 0, tl.div_rn(values, factors), values * factors)
        changed -= amounts.to(tl.float32)
        values = tl.where(counts > 0, changed, values)
    if mask >= 0:
        tokens = first_token + columns
        words = tokens // 32
        own = tl.load(masks + mask * num_words + words, mask=words < num_words, other=0)
        is_allowed = ((own >> (tokens % 32)) & 1) > 0
        values = tl.where(is_allowed | is_faulty, values, float("-inf"))
    tl.store(logits, values, mask=is_held)
