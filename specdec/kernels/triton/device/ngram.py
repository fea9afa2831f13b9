"""Prompt lookup in the texts of sequences: matches of their ends, and what followed the best one.

A place is scored by the tokens up to it that end the text too, then by its index, so that the
longest match is found, and of these the last one.
"""

import triton
import triton.language as tl

_NO_MATCH = tl.constexpr(-1)

# Arguments for whose values nothing is compiled again.
_SIZES = ("size", "num_parts", "num_tokens")


@triton.jit(do_not_specialize=_SIZES)
def find_matches(
    token_ids,  # [num_texts, size] int32
    texts,  # [B] int64, the text of each sequence
    lengths,  # [B] int64
    num_wanted,  # [B] int64, tokens to draft
    scores,  # output [B, num_parts] int32, the best score of each part; -1 without a match
    size,
    SHORTEST: tl.constexpr,  # fewest tokens of a match
    LONGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Score the blocks of a part, which are as far apart as there are parts; grid (B, num_parts).

    A text is read as far as it goes, and not where no draft is wanted.
    """
    sequence, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_parts = tl.num_programs(1)
    text = token_ids + tl.load(texts + sequence) * size
    last = tl.load(lengths + sequence).to(tl.int32) - 1
    end = tl.where(tl.load(num_wanted + sequence) > 0, last, 0)
    best = tl.full([BLOCK], _NO_MATCH, tl.int32)
    for start in range(part * BLOCK, end, num_parts * BLOCK):
        index = start + tl.arange(0, BLOCK)
        goes_on = index < last
        matches = tl.zeros([BLOCK], tl.int32)
        for count in tl.static_range(LONGEST):
            goes_on = goes_on & (index >= count)
            token = tl.load(text + tl.maximum(last - count, 0))
            own = tl.load(text + index - count, mask=goes_on, other=0)
            goes_on = goes_on & (own == token)
            matches += goes_on.to(tl.int32)
        found = tl.where(matches < SHORTEST, _NO_MATCH, matches * size + index)
        best = tl.maximum(best, found)
    tl.store(scores + sequence * num_parts + part, tl.max(best, 0))


@triton.jit(do_not_specialize=_SIZES)
def copy_continuations(
    token_ids,  # as above
    texts,
    lengths,
    num_wanted,
    scores,  # [B, num_parts] int32
    drafts,  # output [B, 1 + num_tokens] int64: the number of tokens, the tokens, and zeros
    size,
    num_parts,
    num_tokens,
    BLOCK_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the tokens after the best match of a text; past its end they repeat; grid (B,)."""
    sequence = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, BLOCK_PARTS)
    own = scores + sequence * num_parts + parts
    best = tl.max(tl.load(own, mask=parts < num_parts, other=_NO_MATCH), 0)
    count = tl.where(best >= 0, tl.maximum(tl.load(num_wanted + sequence), 0), 0)
    start = tl.maximum(best, 0) % size + 1
    period = tl.maximum(tl.load(lengths + sequence).to(tl.int32) - start, 1)
    offsets = tl.arange(0, BLOCK)
    text = token_ids + tl.load(texts + sequence) * size
    tokens = tl.load(text + start + offsets % period, mask=offsets < count, other=0)
    row = drafts + sequence * (num_tokens + 1)
    tl.store(row, count)
    tl.store(row + 1 + offsets, tokens.to(tl.int64), mask=offsets < num_tokens)
