"""Gumbel noise that depends on the request and the token alone, never on who asks for it.

The noise of a token is a pure function of (request seed, choice index, output position, token id),
so a draft, another rank or a run after a preemption adds the same noise to the same token. This is
what couples draft and target (see `specdec.verification`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specdec.sampling.philox import Words, key_of, philox4x32

TOKENS_PER_BLOCK = 4
"""Tokens that share one Philox call: block `b` is the token ids from 4b to 4b + 3."""

_WORD_SCALE = 2.0**-32
_LARGEST_UNIFORM = 1 - 2.0**-24

MIN_NOISE = -math.log(-math.log1p(-_LARGEST_UNIFORM))
MAX_NOISE = -math.log(-math.log1p(-_WORD_SCALE / 2))
"""No noise is below MIN_NOISE (about -2.81) or above MAX_NOISE (about 22.87)."""

# Philox holds about eight int64 tensors of this many counters: on a CPU they should stay in its
# second-level cache, elsewhere they should only not fill the memory.
_CPU_SLAB_COUNTERS = 2**15
_SLAB_COUNTERS = 2**22


def gumbel_noise(
    seeds: Tensor,  # [num_rows] int64
    choices: Tensor,  # [num_rows] int64
    positions: Tensor,  # [num_rows] int64
    first_blocks: Tensor,  # [num_rows] int64
    num_blocks: int,
) -> Tensor:
    """Standard Gumbel noise of 4 * num_blocks successive tokens a row, from id 4 * first_blocks.

    Token `t` gets word `t % 4` of Philox4x32-10 under the key `seed` and the counter (t // 4,
    position, choice, 0); a last word that is not 0 is left for other uses of the same seed.
    Positions, choices and blocks are from 0 to 2^32 - 1.

    32 random bits become v = (bits + 0.5) / 2^32 in float32, at most 1 - 2^-24, then
    E = -log1p(-v), which is exponential, and -log(E). Winners of an argmax have small E, hence
    small v, where float32 is dense: all 32 bits of them count, and the largest noise is 22.87. The
    usual -log(-log(u)) has its winners at u near 1, where float32 has only 24 bits: the largest
    noise would be 16.6, and large values would come in visible steps. The coarse end, the clamp
    included, falls on the losers. What is lost is a token less likely than e^-25 of the best one.

    The random bits are the same on every device; the logarithms may differ in the last place.

    Returns [num_rows, 4 * num_blocks] float32.
    """
    noise = torch.empty(len(seeds), num_blocks, TOKENS_PER_BLOCK, device=seeds.device)
    slab_counters = _CPU_SLAB_COUNTERS if seeds.device.type == "cpu" else _SLAB_COUNTERS
    num_rows = max(1, slab_counters // num_blocks)
    for start in range(0, len(seeds), num_rows):
        slab = slice(start, start + num_rows)
        words = _words(seeds[slab], choices[slab], positions[slab], first_blocks[slab], num_blocks)
        for index, word in enumerate(words):
            noise[slab, :, index] = word.T
        _gumbel_of_bits(noise[slab])
    return noise.view(len(seeds), num_blocks * TOKENS_PER_BLOCK)


def _words(
    seeds: Tensor,  # [num_rows]
    choices: Tensor,  # [num_rows]
    positions: Tensor,  # [num_rows]
    first_blocks: Tensor,  # [num_rows]
    num_blocks: int,
) -> Words:
    """The words of each block, [num_blocks, num_rows]: rows last, where they are contiguous."""
    blocks = first_blocks + torch.arange(num_blocks, device=seeds.device).unsqueeze(1)
    rows = positions.unsqueeze(0), choices.unsqueeze(0)
    counter = Words(blocks, *rows, torch.zeros_like(rows[0]))
    return philox4x32(counter, key_of(seeds.unsqueeze(0)))


def _gumbel_of_bits(bits: Tensor) -> Tensor:
    # In place: `bits` holds integers from 0 to 2^32 as float32, and then, after one pass, -v.
    bits.mul_(-_WORD_SCALE).sub_(_WORD_SCALE / 2).clamp_(min=-_LARGEST_UNIFORM)
    return bits.log1p_().neg_().log_().neg_()
