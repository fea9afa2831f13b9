"""Attention over paged KV: queries of a tile, and the merge of a split context."""

import triton
import triton.language as tl

from specdec.config.gpu import attention_splits

SEGMENT_TOKENS = tl.constexpr(attention_splits.SEGMENT_TOKENS)
SEGMENTS_PER_LEVEL = tl.constexpr(attention_splits.SEGMENTS_PER_LEVEL)

LOG2_E = tl.constexpr(1.4426950408889634)

_BATCH_SIZES = ("table_stride", "num_segments", "part_rows", "window", "kv_start")
"""Arguments for whose values nothing is compiled again: a batch may have any."""
_MERGE_STAGES = tl.constexpr(4)


@triton.jit
def segment_start(segment):
    """Return the first position of a segment; the next one starts where it ends."""
    segment = tl.cast(segment, tl.int32)  # in the interpreter it may be an int
    level = segment // SEGMENTS_PER_LEVEL
    before = ((1 << level) - 1) * (SEGMENT_TOKENS * SEGMENTS_PER_LEVEL)
    return before + (segment % SEGMENTS_PER_LEVEL) * (SEGMENT_TOKENS << level)


@triton.jit
def segments_in(context):
    """Return the number of segments of a context."""
    count = tl.full((), 0, tl.int32)
    while segment_start(count) < context:
        count += 1
    return count


@triton.jit
def attend(
    queries,  # [BLOCK_M, BLOCK_D]; of latents the dimensions after the rotated ones
    rotated,  # [BLOCK_M, BLOCK_R], the rotated dimensions; unused unless ROTARY_DIM
    positions,  # [BLOCK_M]
    ancestors,  # [BLOCK_M] int64
    kv_head,
    kv_cache,
    table,  # block table of the sequence
    start,  # first position to read
    end,  # position after the last one to read
    first_node,
    window,
    kv_start,
    scale,
    soft_cap,
    key_scale,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_TREES: tl.constexpr,
    HAS_CAP: tl.constexpr,
    NUM_AHEAD: tl.constexpr,
):
    """Return maximum, sum and weighted values over the positions from `start` to `end`.

    Blocks of BLOCK_N positions are aligned to the start of the sequence. A block in which a row
    sees nothing leaves its result unchanged, bit for bit.

    With ROTARY_DIM a slot has one key, of which the dimensions after the rotated ones are the
    value too, and are read once.
    """
    dims = tl.arange(0, BLOCK_D)
    SLOT_STRIDE: tl.constexpr = HEAD_DIM if ROTARY_DIM else 2 * KV_HEADS * HEAD_DIM
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    values_sum = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for block in range(start // BLOCK_N * BLOCK_N, end, BLOCK_N):
        keys_at = block + tl.arange(0, BLOCK_N)
        is_key = (keys_at >= start) & (keys_at < end)
        pages = tl.load(table + keys_at // PAGE, mask=is_key, other=0)
        slots = pages.to(tl.int64) * PAGE + keys_at % PAGE
        address = kv_cache + slots * SLOT_STRIDE
        address += ROTARY_DIM if ROTARY_DIM else kv_head * HEAD_DIM
        is_read = is_key[:, None] & (dims < VALUE_DIM)[None, :]
        keys = tl.load(address[:, None] + dims[None, :], mask=is_read, other=0.0)
        keys = keys.to(queries.dtype)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        if ROTARY_DIM:
            first = tl.arange(0, BLOCK_R)
            is_first = is_key[:, None] & (first < ROTARY_DIM)[None, :]
            at = address[:, None] - ROTARY_DIM + first[None, :]
            turned = tl.load(at, mask=is_first, other=0.0).to(queries.dtype)
            scores = tl.dot(rotated, tl.trans(turned), scores, input_precision="ieee")
        scores *= scale * key_scale
        if HAS_CAP:
            scores = soft_cap * (1 - 2 / (tl.exp(2 * scores / soft_cap) + 1))  # tanh
        is_seen = keys_at[None, :] > positions[:, None] - window
        is_seen &= (keys_at >= kv_start)[None, :] & is_key[None, :]
        if HAS_TREES:
            node = keys_at - first_node
            words = (ancestors[:, None] >> tl.minimum(tl.maximum(node, 0), 63)[None, :]) & 1
            is_text = (node < 0)[None, :] & (keys_at[None, :] <= positions[:, None])
            # The window of nodes is applied to the words, since they are not at their positions.
            is_seen = (is_seen & is_text) | ((node >= 0) & is_key)[None, :] & (words == 1)
        else:
            is_seen &= keys_at[None, :] <= positions[:, None] + NUM_AHEAD
        scores = tl.where(is_seen, scores * LOG2_E, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - finite[:, None])
        rescale = tl.exp2(maximum - finite)
        total = total * rescale + tl.sum(weights, 1)
        if ROTARY_DIM:
            values = keys
        else:
            at = address[:, None] + KV_HEADS * HEAD_DIM + dims[None, :]
            values = tl.load(at, mask=is_read, other=0.0).to(queries.dtype)
        weighted = tl.dot(weights.to(queries.dtype), values, input_precision="ieee")
        values_sum = values_sum * rescale[:, None] + weighted
        maximum = higher
    return maximum, total, values_sum


@triton.jit
def merge(maximum, total, values, own_maximum, own_total, own_values):
    """Return the softmax state of two sets of positions; one without any leaves the other as is."""
    higher = tl.maximum(maximum, own_maximum)
    finite = tl.where(higher == float("-inf"), 0.0, higher)
    old, new = tl.exp2(maximum - finite), tl.exp2(own_maximum - finite)
    # Explicit fused operations: the bits do not depend on where a compiler fuses others.
    total = tl.fma(total, old, own_total * new)
    values = tl.fma(values, old[:, None] + tl.zeros_like(values), own_values * new[:, None])
    return higher, total, values


@triton.jit
def add_sinks(maximum, total, sinks, heads, is_row):
    """Return the sum of weights with those of the sinks, keys without a value, of `heads`.

    A row that sees no key has no value, whatever its sum is.
    """
    sink = tl.load(sinks + heads, mask=is_row, other=float("-inf")).to(tl.float32) * LOG2_E
    finite = tl.where(maximum == float("-inf"), 0.0, maximum)
    return total + tl.exp2(sink - finite)


@triton.jit(do_not_specialize=_BATCH_SIZES)
def paged_attention(
    query,  # [T, H, HEAD_DIM]
    kv_cache,  # [num_slots, 2, KV_HEADS, HEAD_DIM]; with ROTARY_DIM [num_slots, HEAD_DIM]
    output,  # [T, H, VALUE_DIM], or float32 [tiles, KV_HEADS, num_segments, part_rows, VALUE_DIM]
    statistics,  # float32 [tiles, KV_HEADS, num_segments, 2, part_rows]; unused unless HAS_PARTS
    tile_sequences,  # [tiles] int32; -1 for a tile without queries
    tile_tokens,  # [tiles] int32, first query of the tile within its sequence
    cu_seqlens,  # [B + 1] int32
    context_lens,  # [B] integers
    first_nodes,  # [B] integers, position in the cache of the first node of a tree
    block_tables,  # [B, table_stride] integers
    positions,  # [T] integers
    ancestors,  # [T] int64; unused unless HAS_TREES
    sinks,  # [H]; unused unless HAS_SINKS
    table_stride,
    num_segments,
    part_rows,  # rows of a tile that can have a query
    window,
    kv_start,
    scale,
    soft_cap,
    key_scale,
    value_scale,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    FIRST_HEAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_TREES: tl.constexpr,
    HAS_CAP: tl.constexpr,
    NUM_AHEAD: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    HAS_PARTS: tl.constexpr,
):
    """Attend with the queries of one tile and one KV head; grid (tiles, KV_HEADS, splits).

    Row r of a tile is head r % GROUP of token r // GROUP, so that keys and values are read once for
    all heads of a group and all queries of a tile. Heads before FIRST_HEAD in the first group, and
    those beyond NUM_HEADS in the last, are on other ranks.

    HAS_SEGMENTS: the context is divided into segments, which are merged in order: here, or where
    HAS_PARTS by `merge_segments`. A program then has each segment that is `split` modulo the grid;
    parts after the context are not written.

    NUM_AHEAD: positions after its own that a query sees, as in a block of drafts that are made
    together; 0 with trees.

    ROTARY_DIM: the rotated dimensions, which are first, of a key that all heads share; VALUE_DIM
    are its others. KV_HEADS are then parts of the heads, which have equal keys. 0 for others.
    """
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(tile_sequences + tile)
    if sequence >= 0:
        rows = tl.arange(0, BLOCK_M)
        dims = tl.arange(0, BLOCK_D)
        tokens = tl.load(cu_seqlens + sequence) + tl.load(tile_tokens + tile) + rows // GROUP
        heads = kv_head * GROUP + rows % GROUP - FIRST_HEAD
        is_row = (rows < BLOCK_M // GROUP * GROUP) & (heads >= 0) & (heads < NUM_HEADS)
        is_row &= tokens < tl.load(cu_seqlens + sequence + 1)
        row = (tokens * NUM_HEADS + heads).to(tl.int64)
        is_dim = is_row[:, None] & (dims < VALUE_DIM)[None, :]
        of_row = query + row[:, None] * HEAD_DIM
        queries = tl.load(of_row + ROTARY_DIM + dims[None, :], mask=is_dim, other=0.0)
        rotated = queries
        if ROTARY_DIM:
            first = tl.arange(0, BLOCK_R)
            is_first = is_row[:, None] & (first < ROTARY_DIM)[None, :]
            rotated = tl.load(of_row + first[None, :], mask=is_first, other=0.0)
        own = tl.load(positions + tokens, mask=is_row, other=-1).to(tl.int32)
        context = tl.load(context_lens + sequence).to(tl.int32)
        first_node = tl.load(first_nodes + sequence).to(tl.int32)
        words = tl.zeros([BLOCK_M], tl.int64)
        end = tl.minimum(tl.max(own, 0) + 1 + NUM_AHEAD, context)
        if HAS_TREES:
            words = tl.load(ancestors + tokens, mask=is_row, other=0)
            end = tl.where(first_node < context, context, end)
        earliest = tl.min(tl.where(is_row, own, 2147483647), 0) - window + 1
        start = tl.maximum(earliest, kv_start)
        table = block_tables + sequence.to(tl.int64) * table_stride
        if HAS_PARTS:
            for segment in range(split, segments_in(context), tl.num_programs(2)):
                maximum, total, values = attend(
                    queries, rotated, own, words, kv_head, kv_cache, table,
                    tl.maximum(start, segment_start(segment)),
                    tl.minimum(end, segment_start(segment + 1)),
                    first_node, window, kv_start, scale, soft_cap, key_scale,
                    KV_HEADS, HEAD_DIM, VALUE_DIM, ROTARY_DIM, BLOCK_D, BLOCK_R, PAGE,
                    BLOCK_M, BLOCK_N, HAS_TREES, HAS_CAP, NUM_AHEAD,
                )  # fmt: skip
                part = ((tile * KV_HEADS + kv_head) * num_segments + segment).to(tl.int64)
                at = statistics + part * (2 * part_rows) + rows
                tl.store(at, maximum, mask=is_row)
                tl.store(at + part_rows, total, mask=is_row)
                at = output + part * part_rows * VALUE_DIM + rows[:, None] * VALUE_DIM
                tl.store(at + dims[None, :], values, mask=is_dim)
        else:
            if HAS_SEGMENTS:
                maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
                total = tl.zeros([BLOCK_M], tl.float32)
                values = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                segment = tl.full((), 0, tl.int32)
                while segment_start(segment) < end:
                    own_maximum, own_total, own_values = attend(
                        queries, rotated, own, words, kv_head, kv_cache, table,
                        tl.maximum(start, segment_start(segment)),
                        tl.minimum(end, segment_start(segment + 1)),
                        first_node, window, kv_start, scale, soft_cap, key_scale,
                        KV_HEADS, HEAD_DIM, VALUE_DIM, ROTARY_DIM, BLOCK_D, BLOCK_R, PAGE,
                        BLOCK_M, BLOCK_N, HAS_TREES, HAS_CAP, NUM_AHEAD,
                    )  # fmt: skip
                    maximum, total, values = merge(
                        maximum, total, values, own_maximum, own_total, own_values
                    )
                    segment += 1
            else:
                maximum, total, values = attend(
                    queries, rotated, own, words, kv_head, kv_cache, table, start, end,
                    first_node, window, kv_start, scale, soft_cap, key_scale,
                    KV_HEADS, HEAD_DIM, VALUE_DIM, ROTARY_DIM, BLOCK_D, BLOCK_R, PAGE,
                    BLOCK_M, BLOCK_N, HAS_TREES, HAS_CAP, NUM_AHEAD,
                )  # fmt: skip
            if HAS_SINKS:
                total = add_sinks(maximum, total, sinks, heads, is_row)
            attended = values * value_scale / tl.where(total > 0, total, 1.0)[:, None]
            at = output + row[:, None] * VALUE_DIM + dims[None, :]
            tl.store(at, attended, mask=is_dim)


@triton.jit(do_not_specialize=_BATCH_SIZES)
def merge_segments(
    partial,  # float32 [tiles, KV_HEADS, num_segments, part_rows, VALUE_DIM]
    statistics,  # float32 [tiles, KV_HEADS, num_segments, 2, part_rows]
    output,  # [T, H, VALUE_DIM]
    tile_sequences,  # as in paged_attention
    tile_tokens,
    cu_seqlens,
    context_lens,
    sinks,  # [H]; unused unless HAS_SINKS
    num_segments,
    part_rows,
    value_scale,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    FIRST_HEAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merge segments of BLOCK_ROWS rows in order; grid (tiles, KV_HEADS, part_rows / BLOCK_ROWS).

    A segment in which a row sees nothing has a maximum of -inf, and leaves the result unchanged.
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tile_sequences + tile)
    if sequence >= 0:
        rows = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        dims = tl.arange(0, BLOCK_D)
        tokens = tl.load(cu_seqlens + sequence) + tl.load(tile_tokens + tile) + rows // GROUP
        heads = kv_head * GROUP + rows % GROUP - FIRST_HEAD
        is_row = (rows < BLOCK_M // GROUP * GROUP) & (heads >= 0) & (heads < NUM_HEADS)
        is_row &= tokens < tl.load(cu_seqlens + sequence + 1)
        maximum = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_ROWS], tl.float32)
        values = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
        count = segments_in(tl.load(context_lens + sequence).to(tl.int32))
        for segment in tl.range(0, count, num_stages=_MERGE_STAGES):
            part = ((tile * KV_HEADS + kv_head) * num_segments + segment).to(tl.int64)
            at = statistics + part * (2 * part_rows) + rows
            own = tl.load(at, mask=is_row, other=float("-inf"))
            own_total = tl.load(at + part_rows, mask=is_row, other=0.0)
            place = part * part_rows * VALUE_DIM + rows[:, None] * VALUE_DIM + dims[None, :]
            is_read = is_row[:, None] & (dims < VALUE_DIM)[None, :]
            own_values = tl.load(partial + place, mask=is_read, other=0.0)
            maximum, total, values = merge(maximum, total, values, own, own_total, own_values)
        if HAS_SINKS:
            total = add_sinks(maximum, total, sinks, heads, is_row)
        place = (tokens * NUM_HEADS + heads).to(tl.int64) * VALUE_DIM
        is_dim = is_row[:, None] & (dims < VALUE_DIM)[None, :]
        merged = values * value_scale / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(output + place[:, None] + dims[None, :], merged, mask=is_dim)
