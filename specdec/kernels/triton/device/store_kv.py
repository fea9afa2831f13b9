"""Rotary embedding and norms of queries and keys, and the write of keys and values to the cache."""

import triton
import triton.language as tl


@triton.jit
def rotate_and_store(
    heads,  # [T, NUM_HEADS + KV_PARTS * KV_HEADS, HEAD_DIM], rows `token_stride` apart
    query,  # output [T, NUM_HEADS, HEAD_DIM]
    kv_cache,  # [num_slots, KV_PARTS, KV_HEADS, HEAD_DIM]
    slots,  # [T] integers; a negative slot is not written
    cos,  # [T, ROTARY_DIM]; unused unless ROTATES
    sin,  # [T, ROTARY_DIM], the first half negated
    query_norm,  # [HEAD_DIM]; unused unless HAS_NORM
    key_norm,  # [HEAD_DIM]
    token_stride,
    eps,
    key_scale,
    value_scale,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KV_PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROTATES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Normalize and rotate BLOCK_H heads of one token; grid (T, ceil(heads / BLOCK_H)).

    Queries go to `query`, keys and values to their slot, divided by their scale and clamped to
    LARGEST, the largest value of the cache's type; 0 for no limit. KV_PARTS: 2 for keys and
    values, 1 for latents.
    """
    token = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    is_query, is_value = index < NUM_HEADS, index >= NUM_HEADS + KV_HEADS
    is_read = (index < NUM_HEADS + KV_PARTS * KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    row = heads + token * token_stride + index[:, None] * HEAD_DIM
    x = tl.load(row + dims[None, :], mask=is_read, other=0.0).to(tl.float32)
    result = x
    if HAS_NORM:
        mean = tl.sum(x * x, 1) / HEAD_DIM
        inverse = 1 / tl.sqrt(mean + eps)
        result = _scale_heads(x, inverse, query_norm, key_norm, is_query, dims, HEAD_DIM)
    if ROTATES:
        half: tl.constexpr = ROTARY_DIM // 2
        partner = tl.where(dims < half, dims + half, dims - half)
        is_rotated = dims < ROTARY_DIM
        partner = tl.where(is_rotated, partner, dims)
        other = tl.load(row + partner[None, :], mask=is_read, other=0.0).to(tl.float32)
        if HAS_NORM:
            other = _scale_heads(other, inverse, query_norm, key_norm, is_query, partner, HEAD_DIM)
        angle = token * ROTARY_DIM + dims
        cosine = tl.load(cos + angle, mask=is_rotated, other=1.0).to(tl.float32)
        sine = tl.load(sin + angle, mask=is_rotated, other=0.0).to(tl.float32)
        result = result * cosine[None, :] + other * sine[None, :]
    result = tl.where(is_value[:, None], x, result)
    place = (token * NUM_HEADS + index[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(query + place, result, mask=is_read & is_query[:, None])
    slot = tl.load(slots + token).to(tl.int64)
    stored = result / tl.where(is_value, value_scale, key_scale)[:, None]
    if LARGEST > 0:
        stored = tl.clamp(stored, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    place = slot * (KV_PARTS * KV_HEADS * HEAD_DIM) + (index - NUM_HEADS)[:, None] * HEAD_DIM
    is_written = is_read & (~is_query)[:, None] & (slot >= 0)
    tl.store(kv_cache + place + dims[None, :], stored.to(kv_cache.dtype.element_ty), is_written)


@triton.jit
def _scale_heads(x, inverse, query_norm, key_norm, is_query, dims, HEAD_DIM: tl.constexpr):
    """Return x [heads, dims] times `inverse` [heads] and the weights of its norm."""
    of_query = tl.load(query_norm + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
    of_key = tl.load(key_norm + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
    weight = tl.where(is_query[:, None], of_query[None, :], of_key[None, :])
    return x * inverse[:, None] * weight
