"""Gumbel noise that depends on the request and the token alone, never on who asks for it.

The noise of a token is a pure function of (request seed, choice index, output position, token id),
so a draft, another rank or a run after a preemption adds the same noise to the same token. This is
what couples draft and target (see `specdec.sampling.verifiers`).

Adding noise to a whole vocabulary would cost more than any other part of sampling, so it is laid
out for skipping most of it. Standard Gumbel noise is -log(S) of independent S ~ Exp(1). In a chunk
of n tokens the smallest S is Exp(1) / n, any token is equally likely to have it, and, since the
exponential has no memory, the others are that smallest one plus an Exp(1) of their own. So a chunk
has one random number for its smallest S, one for who has it, and one for every token; the first
alone bounds the noise of all n (`largest_noise`), and few chunks of a vocabulary are left to
compute in full (`gumbel_noise`). The tokens' noise is independent all the same. This is the
top-down construction of Maddison, Tarlow and Minka, "A* Sampling", NIPS 2014, arXiv 1411.0030, in
one level.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from specdec.sampling.philox import Words, key_of, philox4x32

_LOG_CHUNK_TOKENS = 6
CHUNK_TOKENS = 2**_LOG_CHUNK_TOKENS
"""Chunk `c` is the token ids from 64c to 64c + 63, whatever the size of the vocabulary."""

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

# Counters computed at a time, each in about ten int64 tensors: on a CPU they should stay near its
# caches, elsewhere they only must not fill the memory.
_CPU_SLAB_COUNTERS = 2**15
_SLAB_COUNTERS = 2**22


class Stream(IntEnum):
    """What random numbers of a position are for; those of different streams are independent."""

    COUPLED = 0  # the noise that draft and target share
    DRAFT = 1  # which token is drafted
    ACCEPTANCE = 2  # whether it is kept
    RECOVERY = 3  # what comes after the last one that is kept


@dataclass(frozen=True)
class NoiseKeys:
    """What fixes the noise of a row of logits, together with the token id.

    seeds: 64 bits. choices, positions: the choice of the request and the index among its output
    tokens, from 0 to 2^32 - 1. streams: words that tell uses of a position apart; None: the
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
        """The keys of another use of the same positions, in one round of drafting and verification.

        offsets: [num_rows] int64, how far each position lies behind the round's first one. A
        position that a round does not settle is drafted and verified again in the next. Why it was
        not settled may depend on what was drawn for it: block verification stops at a token because
        of the tokens behind it. The same numbers again would then no longer be uniform. Rounds
        begin at different positions, so a position has another offset in each, and fresh numbers.
        """
        return replace(self, streams=offsets * len(Stream) + stream)


@dataclass(frozen=True)
class LargestNoise:
    """The largest noise within each of some chunks, and the token of the chunk that has it."""

    noise: Tensor  # [num_chunks] float32
    offsets: Tensor  # [num_chunks] int64, from 0 to CHUNK_TOKENS - 1


def largest_noise(keys: NoiseKeys, chunks: Tensor) -> LargestNoise:
    """The largest noise of each chunk, at a seventeenth of the cost of all its noise.

    keys and chunks (ids, [num_chunks] int64) are parallel.
    """
    words = _words(keys, chunks + _FIRST_CHUNK_COUNTER)
    smallest = _exponentials_of_bits(words.w0.float()).div_(CHUNK_TOKENS)
    return LargestNoise(smallest.log_().neg_(), words.w1 >> (_WORD_BITS - _LOG_CHUNK_TOKENS))


def gumbel_noise(keys: NoiseKeys, chunks: Tensor) -> Tensor:
    """The noise of every token of each chunk.

    keys and chunks (ids, [num_chunks] int64) are parallel. Philox4x32-10 is keyed by the seed.
    Token `t` has word t % 4 of counter (t // 4, position, choice, 0); chunk `c` has word 0 for its
    smallest S, and the upper bits of word 1 for who has it, of counter (2^31 + c, position,
    choice, 0). The last word is the stream's, and 0 that of the coupled noise.

    32 random bits become v = (bits + 0.5) / 2^32 in float32, at most 1 - 2^-24, and then the
    exponential -log1p(-v). Winners of an argmax have small exponentials, hence small v, where
    float32 is dense: all 32 bits of them count. The usual -log(-log(u)) has its winners at u near
    1, where float32 has only 24 bits: no noise would exceed 16.6, and large values would come in
    visible steps. The coarse end, the clamp included, falls on losers. What is lost is tokens less
    likely than e^-29 of the best one: they are never drawn.

    The random bits are the same on every device; the logarithms may differ in the last place.

    Returns [num_chunks, CHUNK_TOKENS] float32.
    """
    noise = torch.empty(len(keys), CHUNK_TOKENS, dtype=torch.float32, device=chunks.device)
    slab_counters = _CPU_SLAB_COUNTERS if chunks.device.type == "cpu" else _SLAB_COUNTERS
    slab_chunks = slab_counters // _CALLS_PER_CHUNK
    for start in range(0, len(keys), slab_chunks):
        slab = slice(start, start + slab_chunks)
        _fill_noise(noise[slab], keys[slab], chunks[slab])
    return noise


def uniforms(keys: NoiseKeys) -> Tensor:
    """One random number a key, [num_keys] float64, above 0 and below 1.

    It is (bits + 0.5) / 2^32 of word 0 of the key's counter 0, so the stream must have no use for
    Gumbel noise.
    """
    bits = _words(keys, torch.zeros_like(keys.positions)).w0
    return (bits.double() + 0.5) * 2.0**-_WORD_BITS


def _fill_noise(noise: Tensor, keys: NoiseKeys, chunks: Tensor) -> None:
    """noise: [num_chunks, CHUNK_TOKENS], overwritten."""
    calls = torch.arange(_CALLS_PER_CHUNK, device=chunks.device).unsqueeze(1)
    counters = torch.cat(
        [chunks * _CALLS_PER_CHUNK + calls, chunks.unsqueeze(0) + _FIRST_CHUNK_COUNTER]
    )  # [_CALLS_PER_CHUNK + 1, num_chunks]: the chunks are last, where they are contiguous
    words = _words(keys, counters)
    by_call = noise.view(-1, _CALLS_PER_CHUNK, _TOKENS_PER_CALL)
    for index, word in enumerate(words):
        by_call[:, :, index] = word[:-1].T
    smallest = _exponentials_of_bits(words.w0[-1:].T.float()).div_(CHUNK_TOKENS)
    offsets = words.w1[-1:].T >> (_WORD_BITS - _LOG_CHUNK_TOKENS)
    _exponentials_of_bits(noise).add_(smallest).scatter_(1, offsets, smallest)
    noise.log_().neg_()


def _words(keys: NoiseKeys, counters: Tensor) -> Words:
    """counters: [..., num_keys] int64, from 0 to 2^32 - 1."""
    streams = torch.zeros_like(keys.choices) if keys.streams is None else keys.streams
    counter = Words(counters, keys.positions, keys.choices, streams)
    return philox4x32(counter, key_of(keys.seeds))


def _exponentials_of_bits(bits: Tensor) -> Tensor:
    """In place; `bits` are integers from 0 to 2^32 in float32, and then, after one line, -v."""
    bits.mul_(-(2.0**-_WORD_BITS)).sub_(2.0 ** -(_WORD_BITS + 1)).clamp_(min=-_LARGEST_UNIFORM)
    return bits.log1p_().neg_()
