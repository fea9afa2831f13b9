"""Kernels of recurrent layers: a program runs all tokens of a row, for a part of its channels.

`specdec.kernels.reference.device_states` defines rows and spans. Tokens follow each other in one
loop, those that are replayed first, so that a token has the same operations, and so the same bits,
with any chunks, in any batch, and whether it is replayed or not.
"""

import triton
import triton.language as tl

from specdec.kernels.triton.device.logarithm import log

_SPAN_WORDS = tl.constexpr(6)
_NORM_EPS = tl.constexpr(1e-6)
_LARGE_STEP = tl.constexpr(20.0)


@triton.jit
def convolve(
    inputs,  # [T, num_inputs], rows `stride` apart
    pool,  # of the layer: [num_slots, WINDOW + MAX_GUESSES, num_inputs], changed
    spans,  # int64 [B, 6]: slot, first token, replayed, tokens, committed, kept; see RowPlan
    weight,  # [num_channels, WINDOW + 1]
    bias,  # [num_channels]; unused unless HAS_BIAS
    mixed,  # output float32 [B * MAX_GUESSES + T, num_inputs]
    stride,
    num_inputs,
    first_channel,  # column of it
    num_channels,
    WINDOW: tl.constexpr,
    MAX_GUESSES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Convolve channels over a row's inputs, and keep its last ones; grid (B, tiles of columns).

    The inputs of a row are those in the pool, then those of its tokens. BLOCK_S: at least
    WINDOW + MAX_GUESSES.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    span = spans + row * _SPAN_WORDS
    slot, first, num_replayed = tl.load(span), tl.load(span + 1), tl.load(span + 2)
    num_tokens, num_committed, num_kept = tl.load(span + 3), tl.load(span + 4), tl.load(span + 5)
    is_column, channels = columns < num_inputs, columns - first_channel
    is_channel = (channels >= 0) & (channels < num_channels)
    stored = pool + slot * (WINDOW + MAX_GUESSES) * num_inputs + columns[None, :]
    num_stored = WINDOW + num_replayed
    given = inputs + columns[None, :]
    num_run = tl.where(num_tokens > 0, num_replayed + num_tokens, 0)
    before = row * MAX_GUESSES
    after = tl.num_programs(0).to(tl.int64) * MAX_GUESSES + first - num_replayed
    for begin in range(0, num_run, BLOCK_T):
        index = begin + tl.arange(0, BLOCK_T)
        total = tl.zeros([BLOCK_T, BLOCK], tl.float32)
        value = total
        for tap in tl.static_range(WINDOW + 1):
            value = _inputs_at(
                stored, given, index + tap, num_stored, first, num_tokens, num_inputs, stride,
                is_column,
            )  # fmt: skip
            factor = tl.load(weight + channels * (WINDOW + 1) + tap, mask=is_channel, other=0.0)
            total += value * factor.to(tl.float32)[None, :]
        if HAS_BIAS:
            total += tl.load(bias + channels, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        if ACTIVATES:
            total = total / (1 + tl.exp(-total))
        total = tl.where(is_channel[None, :], total, value)
        places = tl.where(index < num_replayed, before + index, after + index)
        is_run = (index < num_run)[:, None] & is_column[None, :]
        tl.store(mixed + places[:, None] * num_inputs + columns[None, :], total, mask=is_run)
    if num_tokens > 0:
        places = tl.arange(0, BLOCK_S).to(tl.int64)
        kept = _inputs_at(
            stored, given, num_committed + places, num_stored, first, num_tokens, num_inputs,
            stride, is_column,
        )  # fmt: skip
        tl.debug_barrier()  # the threads of the program have read the pool before one writes it
        is_kept = (places < WINDOW + num_kept)[:, None] & is_column[None, :]
        tl.store(stored + places[:, None] * num_inputs, kept.to(pool.dtype.element_ty), is_kept)


@triton.jit
def _inputs_at(
    stored, given, places, num_stored, first, num_tokens, num_inputs, stride, is_column
):  # fmt: skip
    """Return the inputs of a row at some places, in float32: of the pool, then of its tokens."""
    token = places - num_stored
    is_stored = (token < 0)[:, None] & is_column[None, :]
    is_given = ((token >= 0) & (token < num_tokens))[:, None] & is_column[None, :]
    old = tl.load(stored + places[:, None] * num_inputs, mask=is_stored, other=0.0)
    new = tl.load(given + (first + token)[:, None] * stride, mask=is_given, other=0.0)
    return old.to(tl.float32) + new.to(tl.float32)


@triton.jit
def run_delta(
    mixed,  # float32 [B * MAX_GUESSES + T, num_inputs]
    spans,
    memory,  # of the layer: float32 [num_slots, heads, KEY_DIM, VALUE_DIM], changed
    output,  # float32 [T, heads, VALUE_DIM]
    rate,  # float32 [heads]
    bias,  # float32 [heads], or [heads, KEY_DIM] if BY_CHANNEL
    skip,  # float32 [heads]; unused unless HAS_SKIP
    num_inputs,
    query_at,  # columns of mixed inputs, as in DeltaRule
    key_at,
    value_at,
    decay_at,
    share_at,
    first_head,
    heads_per_key,
    query_scale,
    share_scale,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    MAX_GUESSES: tl.constexpr,
    NORMALIZES: tl.constexpr,
    HAS_SHARE: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Run a rule of `gated_delta` for columns of a head's memory; grid (B, heads, column tiles).

    The memory is in registers for all tokens of a row. It is stored after the committed ones.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_heads = tl.num_programs(1)
    keys, values = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = keys < KEY_DIM, values < VALUE_DIM
    span = spans + row * _SPAN_WORDS
    slot, first, num_replayed = tl.load(span), tl.load(span + 1), tl.load(span + 2)
    num_tokens, num_committed = tl.load(span + 3), tl.load(span + 4)
    num_run = tl.where(num_tokens > 0, num_replayed + num_tokens, 0)
    is_memory = is_key[:, None] & is_value[None, :] & (num_run > 0)
    own = memory + (slot * num_heads + head) * KEY_DIM * VALUE_DIM
    own += keys[:, None] * VALUE_DIM + values[None, :]
    state = tl.load(own, mask=is_memory, other=0.0)
    head_rate = tl.load(rate + head)
    if BY_CHANNEL:
        head_bias = tl.load(bias + head * KEY_DIM + keys, mask=is_key, other=0.0)
    else:
        head_bias = tl.load(bias + head)
    of_keys = (first_head + head) // heads_per_key * KEY_DIM + keys
    of_values = head * VALUE_DIM + values
    before = row * MAX_GUESSES
    after = tl.num_programs(0).to(tl.int64) * MAX_GUESSES + first - num_replayed
    for index in range(0, num_run):
        at = mixed + tl.where(index < num_replayed, before + index, after + index) * num_inputs
        query = tl.load(at + query_at + of_keys, mask=is_key, other=0.0)
        key = tl.load(at + key_at + of_keys, mask=is_key, other=0.0)
        value = tl.load(at + value_at + of_values, mask=is_value, other=0.0)
        if NORMALIZES:
            query = query / tl.sqrt(tl.sum(query * query, 0) + _NORM_EPS)
            key = key / tl.sqrt(tl.sum(key * key, 0) + _NORM_EPS)
        query = query * query_scale
        if BY_CHANNEL:
            raw = tl.load(at + decay_at + head * KEY_DIM + keys, mask=is_key, other=0.0)
            state *= tl.exp(-head_rate * softplus(raw + head_bias))[:, None]
            step = 1.0
        else:
            step = softplus(tl.load(at + decay_at + head) + head_bias)
            state *= tl.exp(-head_rate * step)
        if HAS_SHARE:
            share = share_scale / (1 + tl.exp(-tl.load(at + share_at + head)))
            new = (value - tl.sum(state * key[:, None], 0)) * share
        else:
            new = value * step
        state += key[:, None] * new[None, :]
        found = tl.sum(state * query[:, None], 0)
        if HAS_SKIP:
            found += tl.load(skip + head) * value
        token = first + index - num_replayed
        at_output = output + token * num_heads * VALUE_DIM + of_values
        tl.store(at_output, found, mask=is_value & (index >= num_replayed))
        if index + 1 == num_committed:
            tl.store(own, state, mask=is_memory)


@triton.jit
def run_scan(
    mixed,  # float32 [B * MAX_GUESSES + T, num_channels], values
    steps,  # [B * MAX_GUESSES + T, num_channels]
    keys,  # [B * MAX_GUESSES + T, STATE_DIM], as queries
    queries,
    spans,
    memory,  # of the layer: float32 [num_slots, num_channels, STATE_DIM], changed
    output,  # float32 [T, num_channels]
    rate,  # float32 [num_channels, STATE_DIM]
    skip,  # float32 [num_channels]
    num_channels,
    STATE_DIM: tl.constexpr,
    MAX_GUESSES: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Run the selective scan of BLOCK channels of a row; grid (B, tiles of channels)."""
    row = tl.program_id(0).to(tl.int64)
    channels, places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_S)
    is_channel, is_place = channels < num_channels, places < STATE_DIM
    span = spans + row * _SPAN_WORDS
    slot, first, num_replayed = tl.load(span), tl.load(span + 1), tl.load(span + 2)
    num_tokens, num_committed = tl.load(span + 3), tl.load(span + 4)
    num_run = tl.where(num_tokens > 0, num_replayed + num_tokens, 0)
    is_state = is_channel[:, None] & is_place[None, :]
    of_state = channels[:, None] * STATE_DIM + places[None, :]
    own, is_memory = memory + slot * num_channels * STATE_DIM + of_state, is_state & (num_run > 0)
    state = tl.load(own, mask=is_memory, other=0.0)
    rates = tl.load(rate + of_state, mask=is_state, other=0.0)
    skips = tl.load(skip + channels, mask=is_channel, other=0.0)
    before = row * MAX_GUESSES
    after = tl.num_programs(0).to(tl.int64) * MAX_GUESSES + first - num_replayed
    for index in range(0, num_run):
        at = tl.where(index < num_replayed, before + index, after + index)
        value = tl.load(mixed + at * num_channels + channels, mask=is_channel, other=0.0)
        raw = tl.load(steps + at * num_channels + channels, mask=is_channel, other=0.0)
        key = tl.load(keys + at * STATE_DIM + places, mask=is_place, other=0.0).to(tl.float32)
        query = tl.load(queries + at * STATE_DIM + places, mask=is_place, other=0.0)
        step = softplus(raw.to(tl.float32))
        state = state * tl.exp(-rates * step[:, None]) + key[None, :] * (value * step)[:, None]
        found = tl.sum(state * query.to(tl.float32)[None, :], 1) + skips * value
        at_output = output + (first + index - num_replayed) * num_channels + channels
        tl.store(at_output, found, mask=is_channel & (index >= num_replayed))
        if index + 1 == num_committed:
            tl.store(own, state, mask=is_memory)


@triton.jit
def softplus(x):
    """Return log(1 + e^x), accurate where it is small."""
    power = tl.exp(tl.where(x > _LARGE_STEP, _LARGE_STEP, x))  # a minimum would drop NaN on a GPU
    total = 1 + power
    part = total - 1  # of the power, after rounding
    is_lost = part == 0
    ratio = power / tl.where(is_lost, 1.0, part)
    return tl.where(x > _LARGE_STEP, x, tl.where(is_lost, power, log(total) * ratio))


@triton.jit
def gate_heads(
    found,  # float32 [T, heads, SIZE]
    gates,  # [T, heads * SIZE], rows `stride` apart
    weight,  # [SIZE]
    output,  # [T, heads, SIZE]
    stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
    IS_SILU: tl.constexpr,
):
    """Normalize the outputs of a head, and multiply them by activated gates; grid (T, heads)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_heads = tl.num_programs(1)
    places = tl.arange(0, BLOCK)
    is_read = places < SIZE
    at = (token * num_heads + head) * SIZE + places
    dtype = output.dtype.element_ty
    values = tl.load(found + at, mask=is_read, other=0.0)
    gate = tl.load(gates + token * stride + head * SIZE + places, mask=is_read, other=0.0)
    weights = tl.load(weight + places, mask=is_read, other=0.0).to(tl.float32)
    if ROUNDS:
        values = values.to(dtype).to(tl.float32)
    values = values / tl.sqrt(tl.sum(values * values, 0) / SIZE + eps)
    if ROUNDS:
        values = values.to(dtype).to(tl.float32)
    values *= weights
    if ROUNDS:
        values = values.to(dtype).to(tl.float32)
    gate = gate.to(tl.float32)
    activated = 1 / (1 + tl.exp(-gate))
    if IS_SILU:
        activated *= gate
    tl.store(output + at, values * activated, mask=is_read)
