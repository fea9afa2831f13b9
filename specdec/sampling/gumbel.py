"""Counter-based Gumbel noise, a pure function of (seed, choice, output position, token id).

The draft model, another rank, or a run after a preemption adds the same noise to the same token.
This couples draft and target (see `specdec.sampling.verifiers`).

Computing noise for a whole vocabulary would be the most expensive part of sampling, so the layout
lets most of it be skipped. Standard Gumbel noise is -log(S) of independent S ~ Exp(1). In a chunk
of n tokens the smallest S is Exp(1) / n, each token is equally likely to have it, and, since the
exponential is memoryless, every other S is the smallest one plus an independent Exp(1). So a chunk
has one random number for its smallest S, one for the token that has it, and one for every token.
The first bounds the noise of all n tokens (`largest_noise`), so that few chunks of a vocabulary
are computed in full (`gumbel_noise`). The noise of the tokens is still independent. This is the
top-down construction of Maddison, Tarlow and Minka, "A* Sampling", NIPS 2014, arXiv 1411.0030,
with one level.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

_LOG_CHUNK_TOKENS = 6
CHUNK_TOKENS = 2**_LOG_CHUNK_TOKENS
"""Chunk `c` is the token ids from 64c to 64c + 63, for any vocabulary size."""

_TOKENS_PER_CALL = 4
_CALLS_PER_CHUNK = CHUNK_TOKENS // _TOKENS_PER_CALL
_FIRST_CHUNK_COUNTER = 2**31
"""Counters of chunks start here, beyond those of tokens."""

_WORD_BITS = 32
_LARGEST_UNIFORM = 1 - 2.0**-24
_LARGEST_EXPONENTIAL = -math.log1p(-_LARGEST_UNIFORM)

MIN_NOISE = -math.log(_LARGEST_EXPONENTIAL * (1 + 1 / CHUNK_TOKENS))
"""No noise is smaller than this, about -2.83."""
MAX_NOISE = -math.log(2.0 ** -(_WORD_BITS + 1) / CHUNK_TOKENS)
"""No noise is larger than this, about 27.03."""
NOISE_ROUNDING = 1e-3
"""Above the float32 rounding error of scores and noise, which are below 100 wherever it matters."""
LEAST_SCORE = MIN_NOISE - MAX_NOISE - NOISE_ROUNDING
"""No noise lets a token win whose score is below this; the best score of a row is 0."""

# Number of counters computed at once, each in about ten int64 tensors: on a CPU they should fit
# into the caches, on other devices only into the memory.
_CPU_SLAB_COUNTERS = 2**15
_SLAB_COUNTERS = 2**22


class Stream(IntEnum):
    """The use of a position's random numbers; different streams are independent."""

    COUPLED = 0  # noise shared by draft and target
    DRAFT = 1  # sampling of a draft token
    ACCEPTANCE = 2  # acceptance of a draft token
    RECOVERY = 3  # sampling of the token after the last accepted one


@dataclass(frozen=True)
class NoiseKeys:
    """Keys of the noise of rows of logits; key and token id determine the noise.

    seeds: 64 bits. choices, positions: the choice of the request and the index among its output
    tokens, from 0 to 2^32 - 1. streams: words that distinguish the uses of a position; None: the
    coupled noise.
    """

    seeds: Tensor  # [num_rows] int64
    choices: Tensor  # [num_rows] int64
    positions: Tensor  # [num_rows] int64
    streams: Tensor | None = None  # [num_rows] int64

    def __len__(self) -> int:
        return len(self.seeds)

    def __getitem__(self, rows: Tensor | slice) -> NoiseKeys:
        streams = None if self.streams is None else self.streams[rows]
        return NoiseKeys(self.seeds[rows], self.choices[rows], self.positions[rows], streams)

    def of_stream(self, stream: Stream, offsets: Tensor) -> NoiseKeys:
        """Return the keys of another stream of the same positions, for one round of speculation.

        offsets: [num_rows] int64, distance of each position from the first one of the round. A
        position without an accepted token is drafted and verified again in the next round. The
        rejection may depend on the random numbers used for it: block verification stops at a token
        because of the tokens after it. If these numbers were used again they would not be uniform.
        Rounds begin at different positions, so a position has another offset in each round, hence
        new numbers.
        """
        return replace(self, streams=offsets * len(Stream) + stream)


@dataclass(frozen=True)
class LargestNoise:
    """The largest noise in each chunk, and the token that has it."""

    noise: Tensor  # [num_chunks] float32
    offsets: Tensor  # [num_chunks] int64, from 0 to CHUNK_TOKENS - 1


def largest_noise(keys: NoiseKeys, chunks: Tensor) -> LargestNoise:
    """Return the largest noise of each chunk, at 1/17 of the cost of `gumbel_noise`.

    keys and chunks (ids, [num_chunks] int64) are parallel.
    """
    words = _words(keys, chunks + _FIRST_CHUNK_COUNTER)
    smallest = _exponentials_of_bits(words.w0.float()).div_(CHUNK_TOKENS)
    return LargestNoise(smallest.log_().neg_(), words.w1 >> (_WORD_BITS - _LOG_CHUNK_TOKENS))


def gumbel_noise(keys: NoiseKeys, chunks: Tensor) -> Tensor:
    """Return the noise of every token of each chunk, [num_chunks, CHUNK_TOKENS] float32.

    keys and chunks (ids, [num_chunks] int64) are parallel. Philox4x32-10 is keyed by the seed.
    Token `t` uses word t % 4 of counter (t // 4, position, choice, 0). Chunk `c` uses counter
    (2^31 + c, position, choice, 0): word 0 for its smallest S, the upper bits of word 1 for the
    token that has it. The last word of a counter is the stream; 0 is the coupled noise.

    32 random bits become v = (bits + 0.5) / 2^32 in float32, at most 1 - 2^-24, and then the
    exponential -log1p(-v). The argmax falls on small exponentials, hence small v, where float32 is
    dense: all 32 bits count. The usual -log(-log(u)) has the argmax at u near 1, where float32 has
    only 24 bits: no noise would exceed 16.6, and large values would come in visible steps. Here the
    coarse end, the clamp included, falls on tokens that lose. The cost: tokens less likely than
    e^-29 of the best one are never sampled.

    The random bits are the same on every device; the logarithms may differ in the last place.
    """
    noise = torch.empty(len(keys), CHUNK_TOKENS, dtype=torch.float32, device=chunks.device)
    slab_counters = _CPU_SLAB_COUNTERS if chunks.device.type == "cpu" else _SLAB_COUNTERS
    slab_chunks = slab_counters // _CALLS_PER_CHUNK
    for start in range(0, len(keys), slab_chunks):
        slab = slice(start, start + slab_chunks)
        _fill_noise(noise[slab], keys[slab], chunks[slab])
    return noise


def uniforms(keys: NoiseKeys) -> Tensor:
    """Return one random number for each key, [num_keys] float64, in the open interval (0, 1).

    The number is (bits + 0.5) / 2^32 of word 0 of the key's counter 0, so the stream must not be
    used for Gumbel noise.
    """
    bits = _words(keys, torch.zeros_like(keys.positions)).w0
    return (bits.double() + 0.5) * 2.0**-_WORD_BITS


def _fill_noise(noise: Tensor, keys: NoiseKeys, chunks: Tensor) -> None:
    """Fill `noise`, [num_chunks, CHUNK_TOKENS]."""
    calls = torch.arange(_CALLS_PER_CHUNK, device=chunks.device).unsqueeze(1)
    counters = torch.cat(
        [chunks * _CALLS_PER_CHUNK + calls, chunks.unsqueeze(0) + _FIRST_CHUNK_COUNTER]
    )  # [_CALLS_PER_CHUNK + 1, num_chunks]: chunks last, so that they are contiguous
    words = _words(keys, counters)
    by_call = noise.view(-1, _CALLS_PER_CHUNK, _TOKENS_PER_CALL)
    for index, word in enumerate(words):
        by_call[:, :, index] = word[:-1].T
    smallest = _exponentials_of_bits(words.w0[-1:].T.float()).div_(CHUNK_TOKENS)
    offsets = words.w1[-1:].T >> (_WORD_BITS - _LOG_CHUNK_TOKENS)
    _exponentials_of_bits(noise).add_(smallest).scatter_(1, offsets, smallest)
    noise.log_().neg_()


def _words(keys: NoiseKeys, counters: Tensor) -> Words:
    """Return the random words of counters, [..., num_keys] int64 from 0 to 2^32 - 1."""
    streams = torch.zeros_like(keys.choices) if keys.streams is None else keys.streams
    counter = Words(counters, keys.positions, keys.choices, streams)
    return philox4x32(counter, key_of(keys.seeds))


def _exponentials_of_bits(bits: Tensor) -> Tensor:
    """Turn integers from 0 to 2^32 in float32 into exponentials, in place."""
    # After this line `bits` holds -v; see gumbel_noise.
    bits.mul_(-(2.0**-_WORD_BITS)).sub_(2.0 ** -(_WORD_BITS + 1)).clamp_(min=-_LARGEST_UNIFORM)
    return bits.log1p_().neg_()


_NUM_ROUNDS = 10


def _constant(value: int) -> Tensor:
    # A 0-d CPU tensor works with tensors of any device, and dispatches faster than an int.
    return torch.tensor(value, dtype=torch.int64, device="cpu")


_WORD_SHIFT = _constant(32)
_WORD_MASK = _constant(2**32 - 1)
_MULTIPLIERS = (_constant(0xD2511F53), _constant(0xCD9E8D57))
_WEYL_INCREMENTS = (_constant(0x9E3779B9), _constant(0xBB67AE85))


class Key(NamedTuple):
    """A 64-bit key; words from 0 to 2^32 - 1."""

    w0: Tensor  # int64
    w1: Tensor  # int64


class Words(NamedTuple):
    """A 128-bit counter, or the output of one call; words from 0 to 2^32 - 1."""

    w0: Tensor  # int64
    w1: Tensor  # int64
    w2: Tensor  # int64
    w3: Tensor  # int64


def key_of(seeds: Tensor) -> Key:
    """Return the keys that are the two halves of 64-bit `seeds`, of any shape."""
    return Key(seeds & _WORD_MASK, (seeds >> _WORD_SHIFT) & _WORD_MASK)


def philox4x32(counter: Words, key: Key) -> Words:
    """Return four random words for each counter: Philox4x32-10, exactly as published.

    Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, section
    4. 32-bit words are stored in int64, because torch lacks full unsigned types.

    The words of the key, and all words of the counter but w0, have one shape that broadcasts to
    w0's. If that shape is much smaller than w0's, the first two rounds are nearly free.
    """
    c0, c1, c2, c3 = counter
    for k0, k1 in _round_keys(key):
        product0, product1 = torch.mul(c0, _MULTIPLIERS[0]), torch.mul(c2, _MULTIPLIERS[1])
        c0, c2 = _mix(product1, c1, k0), _mix(product0, c3, k1)
        # Words 1 and 3 are the low halves; the next _mix masks off the bits above them.
        c1, c3 = product1, product0
    return Words(c0, c1 & _WORD_MASK, c2, c3 & _WORD_MASK)


def _round_keys(key: Key) -> list[Key]:
    rounds = torch.arange(_NUM_ROUNDS, device=key.w0.device)
    rounds = rounds.view(-1, *[1] * key.w0.dim())  # [num_rounds, 1, ...]
    schedules = [
        torch.bitwise_and(word + rounds * increment, _WORD_MASK).unbind()
        for word, increment in zip(key, _WEYL_INCREMENTS, strict=True)
    ]
    return [Key(*words) for words in zip(*schedules, strict=True)]


def _mix(product: Tensor, word: Tensor, key: Tensor) -> Tensor:
    # The products fill 64 bits, so the shift inserts copies of the sign bit; the mask drops them.
    mixed = torch.bitwise_right_shift(product, _WORD_SHIFT)
    fits = mixed.dim() >= word.dim() and mixed.numel() >= word.numel()
    mixed = mixed.bitwise_xor_(word) if fits else mixed ^ word
    return mixed.bitwise_xor_(key).bitwise_and_(_WORD_MASK)
