"""The Philox4x32-10 counter-based random generator in torch integer arithmetic.

Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, section 4.
The generator has no state: words are a pure function of (counter, key), so they can be computed in
any order on any device. 32-bit words are stored in int64, because torch lacks full unsigned types.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_NUM_ROUNDS = 10


def _constant(value: int) -> Tensor:
    # A 0-d CPU tensor works with tensors of any device, and dispatches faster than an int.
    return torch.tensor(value, dtype=torch.int64, device="cpu")


_WORD_BITS = _constant(32)
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
    return Key(seeds & _WORD_MASK, (seeds >> _WORD_BITS) & _WORD_MASK)


def philox4x32(counter: Words, key: Key) -> Words:
    """Return four random words for each counter, exactly as published.

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
    mixed = torch.bitwise_right_shift(product, _WORD_BITS)
    fits = mixed.dim() >= word.dim() and mixed.numel() >= word.numel()
    mixed = mixed.bitwise_xor_(word) if fits else mixed ^ word
    return mixed.bitwise_xor_(key).bitwise_and_(_WORD_MASK)
