"""Min-p, top-k and top-p over a vocabulary split across ranks, without sorting or gathering scores.

Each keeps the tokens at or above a score, the floor: min-p from a fraction of the best probability,
top-k from the score of the k-th token, top-p from the score at which enough probability is covered.
The floor of min-p is a logarithm. The others are found digit by digit: the ranks add small
histograms of the scores' leading digits, which determine that digit of the floor; the tokens with
the same digit are searched by the next one (radix select: Alabi, Blanchard, Gordon and Steinbach,
"Fast k-Selection Algorithms for Graphics Processing Units", ACM JEA 17, 2012).

Before that, one histogram of the chunk maxima gives a lower bound of the floor, because it covers
fewer tokens. Usually a few hundred tokens are left to search.

Probabilities are added in float64, so only the order of addition depends on the number of ranks: a
floor can differ between two numbers of ranks only if a sum equals top_p to within about 1e-13.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from specdec.kernels.reference.sample_rows import SampleParams
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.sampling.vocab_shard import ScoreChunks

# Number of scores weighted at once: in float64 they should fit into the caches of a CPU, on other
# devices only into the memory.
_CPU_SLAB_SCORES = 2**17
_SLAB_SCORES = 2**22

# Keys are the bits of -score as float32. -score is not negative, so keys ascend as scores descend.
_KEY_OF_MINUS_INFINITY = 0x7F800000
# The digits of a key, by their lowest bit: the exponent first.
_DIGIT_SHIFTS = (23, 15, 7, 0)
_DIGIT_MASKS = (0xFF, 0xFF, 0xFF, 0x7F)
# A coarse digit comes first, finer where most scores are: eighths of an octave, from 2^-16 to 2^16
# below the best score.
_COARSE_SHIFT = 20
_FIRST_COARSE_DIGIT = (127 - 16) * 8
_NUM_DIGITS = 256
# This fraction of the total is reached before the total itself, for any rounding of the sums.
_ALMOST_ALL = 1 - 2.0**-46

_Weigh = Callable[[Tensor], Tensor]
"""Function from scores [n] float32 to weights [n] float64."""


@dataclass(frozen=True)
class _Tokens:
    """Tokens of this rank, each with the index of its row among the searched rows."""

    rows: Tensor  # int32, broadcasts to scores
    scores: Tensor  # float32

    @classmethod
    def of_maxima(cls, maxima: Tensor) -> _Tokens:
        """Take the best token of every chunk; maxima: [num_rows, num_columns]."""
        rows = torch.arange(len(maxima), dtype=torch.int32, device=maxima.device)
        return cls(rows.unsqueeze(1), maxima)

    @classmethod
    def near(cls, chunks: ScoreChunks, rows: Tensor, floors: Tensor) -> _Tokens:
        """Take the tokens of `rows` that reach `floors`, and the others of their chunks.

        rows: [num_rows] int64. floors: [num_rows] float32.
        """
        searched, columns = (chunks.maxima[rows] >= floors.unsqueeze(1)).nonzero().unbind(1)
        return cls(searched.int().unsqueeze(1), chunks.scores[rows[searched], columns])


@dataclass(frozen=True)
class Limits:
    """One limit for each of some rows."""

    rows: Tensor  # [num_limits] int64
    values: Tensor  # [num_limits] float64

    @classmethod
    def where(cls, chosen: NDArray[np.bool_], values: NDArray[Any], device: torch.device) -> Limits:
        """Collect the limits of the chosen rows."""
        rows, limits = np.flatnonzero(chosen), values[chosen].astype(np.float64)
        return cls(torch.from_numpy(rows).to(device), torch.from_numpy(limits).to(device))

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Truncation:
    """The truncation limits of each row; a row without limits costs nothing."""

    min_score: Limits
    top_k: Limits
    top_p: Limits  # of rows without another limit
    top_p_of_rest: Limits  # of rows that another limit truncates first

    @classmethod
    def of(cls, params: SampleParams, device: torch.device) -> Truncation:
        """Collect the limits of the rows with these sampling parameters."""
        top_k, top_p, min_scores = params["top_k"], params["top_p"], params["min_score"]
        has_min, has_k, has_p = min_scores > -math.inf, top_k > 0, top_p < 1
        has_other = has_k | has_min
        return cls(
            Limits.where(has_min, min_scores, device),
            Limits.where(has_k, top_k, device),
            Limits.where(has_p & ~has_other, top_p, device),
            Limits.where(has_p & has_other, top_p, device),
        )


def min_score(min_p: float) -> float:
    """Return the score of a token that is `min_p` times as likely as the best one."""
    return math.log(min_p) if min_p > 0 else -math.inf


def truncation_floors(
    chunks: ScoreChunks, truncation: Truncation, group: TensorParallelGroup
) -> Tensor:
    """Return the lowest score of each row that passes min_p, top_k and then top_p.

    Scores are logarithms of probabilities relative to the row's best token, so at most 0. Equal
    scores are kept or removed together; top_p applies to the mass that the others leave.

    Returns [num_rows] float32, -inf for a row that is not truncated, equal on every rank. A
    collective call.
    """
    floors = chunks.maxima.new_full((len(chunks.maxima),), -torch.inf)
    if len(truncation.min_score):
        floors[truncation.min_score.rows] = truncation.min_score.values.float()
    if len(truncation.top_k):
        rows, counts = truncation.top_k.rows, truncation.top_k.values
        counted = _floors(chunks, rows, counts, _count, group)
        floors[rows] = torch.maximum(floors[rows], counted)
    if len(truncation.top_p):
        rows, shares = truncation.top_p.rows, truncation.top_p.values
        totals = group.all_reduce(_total_masses(chunks, rows))
        floors[rows] = _floors(chunks, rows, totals * shares, _mass, group)
    if len(truncation.top_p_of_rest):
        rows, shares = truncation.top_p_of_rest.rows, truncation.top_p_of_rest.values
        floors[rows] = _floors_within(chunks, rows, floors[rows], shares, group)
    return floors


def _floors(
    chunks: ScoreChunks,
    rows: Tensor,  # [num_rows] int64
    targets: Tensor,  # [num_rows] float64
    weigh: _Weigh,
    group: TensorParallelGroup,
) -> Tensor:
    """Return the highest floors above which the tokens of `rows` weigh `targets`, [num_rows]."""
    bounds = _bounds(_Tokens.of_maxima(chunks.maxima[rows]), targets, weigh, group)
    return _search(_Tokens.near(chunks, rows, bounds), targets, weigh, group)


def _floors_within(
    chunks: ScoreChunks,
    rows: Tensor,  # [num_rows] int64
    floors: Tensor,  # [num_rows] float32
    shares: Tensor,  # [num_rows] float64
    group: TensorParallelGroup,
) -> Tensor:
    """Return the floors that keep `shares` of the mass above `floors`, [num_rows] float32."""
    tokens = _Tokens.near(chunks, rows, floors)
    tokens.scores.masked_fill_(tokens.scores < floors[tokens.rows], -torch.inf)
    totals = torch.zeros_like(shares)
    totals.index_add_(0, tokens.rows.squeeze(1), _mass(tokens.scores).sum(1))
    return _search(tokens, group.all_reduce(totals) * shares, _mass, group)


def _total_masses(chunks: ScoreChunks, rows: Tensor) -> Tensor:
    """Sum the mass of `rows` ([num_rows] int64), in slabs because of the float64 temporaries."""
    slab_scores = _CPU_SLAB_SCORES if rows.device.type == "cpu" else _SLAB_SCORES
    slabs = rows.split(max(1, slab_scores // chunks.scores[0].numel()))
    return torch.cat([_mass(chunks.scores[slab]).sum((1, 2)) for slab in slabs])


def _bounds(
    maxima: _Tokens,
    targets: Tensor,  # [num_rows] float64
    weigh: _Weigh,
    group: TensorParallelGroup,
) -> Tensor:
    """Return scores above which `maxima` alone weigh `targets`, [num_rows] float32, or -inf."""
    search = _Search.of(maxima, targets, weigh)
    running = search.running_weights(_coarse_digits(search.keys), group)
    digits = (running[:, 1:] < targets.unsqueeze(1)).sum(1, dtype=torch.int32)
    last_keys = ((digits + _FIRST_COARSE_DIGIT + 1) << _COARSE_SHIFT) - 1
    return _scores(last_keys.masked_fill_(digits >= _NUM_DIGITS - 1, _KEY_OF_MINUS_INFINITY))


def _search(
    tokens: _Tokens,
    targets: Tensor,  # [num_rows] float64
    weigh: _Weigh,
    group: TensorParallelGroup,
) -> Tensor:
    """Return the highest scores above which `tokens` weigh `targets`, [num_rows] float32.

    If all tokens together weigh less, the lowest score of a token with a weight.
    """
    search = _Search.of(tokens, targets, weigh)
    search.next_digit(_coarse_digits(search.keys), group)
    floors = torch.zeros_like(targets, dtype=torch.int32)
    for shift, mask in zip(_DIGIT_SHIFTS, _DIGIT_MASKS, strict=True):
        floors += search.next_digit((search.keys >> shift) & mask, group) << shift
    return _scores(floors)


@dataclass
class _Search:
    """State of a radix select: the tokens that may be the floor, and the weight to reach."""

    rows: Tensor  # int32, broadcasts to keys
    keys: Tensor  # int32
    weights: Tensor  # float64, like keys
    targets: Tensor  # [num_rows] float64

    @classmethod
    def of(cls, tokens: _Tokens, targets: Tensor, weigh: _Weigh) -> _Search:
        keys = tokens.scores.abs().view(torch.int32)
        return cls(tokens.rows, keys, weigh(tokens.scores), targets)

    def running_weights(self, digits: Tensor, group: TensorParallelGroup) -> Tensor:
        """Return the weight of all ranks' tokens by digit, cumulative, [num_rows, _NUM_DIGITS + 1].

        digits: of the keys, int32, ascending with them.
        """
        sums = self.targets.new_zeros(len(self.targets) * _NUM_DIGITS)
        bins = self.rows * _NUM_DIGITS + digits
        sums.index_add_(0, bins.flatten(), self.weights.flatten())
        return pad(group.all_reduce(sums).view(-1, _NUM_DIGITS).cumsum(1), (1, 0))

    def next_digit(self, digits: Tensor, group: TensorParallelGroup) -> Tensor:
        """Return the digit of each floor, [num_rows] int32; keep only the tokens with it."""
        running = self.running_weights(digits, group)
        targets = torch.minimum(self.targets, running[:, -1] * _ALMOST_ALL)
        digit = (running[:, 1:] < targets.unsqueeze(1)).sum(1, keepdim=True)
        self.targets = targets - running.gather(1, digit).squeeze(1)
        digit = digit.squeeze(1).int()
        same = (digits == digit[self.rows]).nonzero(as_tuple=True)
        self.rows = self.rows.expand_as(digits)[same]
        self.keys, self.weights = self.keys[same], self.weights[same]
        return digit


def _coarse_digits(keys: Tensor) -> Tensor:
    return ((keys >> _COARSE_SHIFT) - _FIRST_COARSE_DIGIT).clamp_(0, _NUM_DIGITS - 1)


def _scores(keys: Tensor) -> Tensor:
    return -keys.view(torch.float32)


def _count(scores: Tensor) -> Tensor:
    return torch.ones_like(scores, dtype=torch.float64)


def _mass(scores: Tensor) -> Tensor:
    return scores.double().exp_()
