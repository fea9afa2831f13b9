"""Min-p, top-k and top-p over a vocabulary split by rank, without sorting or gathering scores.

All keep the tokens from some score on: min-p from a share of the best probability, top-k from the
score that counts k tokens, top-p from the one that covers enough probability. The first of these
floors is a logarithm. The others are found digit by digit: the ranks add up small histograms of the
scores' leading digits, which settle the floor's; the tokens that share that digit are told apart by
the next one; and so on (radix select: Alabi, Blanchard, Gordon and Steinbach, "Fast k-Selection
Algorithms for Graphics Processing Units", ACM JEA 17, 2012).

Before that, one histogram of the chunks' maxima gives a floor that can only be too low, because it
covers fewer tokens. Usually it leaves a few hundred tokens to search.

Probabilities are added in float64, so only the order of addition depends on the number of ranks: a
floor can differ between two of them only where the sum meets top_p to within about 1e-13.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.distributed.group import TensorParallelGroup
from specdec.sampling.chunks import ScoreChunks

# Scores that are weighed at a time: in float64 they should stay near the caches of a CPU, elsewhere
# they only must not fill the memory.
_CPU_SLAB_SCORES = 2**17
_SLAB_SCORES = 2**22

# Keys are the bits of -score as float32. It is not negative, so they ascend as scores descend.
_KEY_OF_MINUS_INFINITY = 0x7F800000
# A key's digits, by the bit that each starts from: the exponent first.
_DIGIT_SHIFTS = (23, 15, 7, 0)
_DIGIT_MASKS = (0xFF, 0xFF, 0xFF, 0x7F)
# What comes before them tells more tokens apart where they are many: eighths of an octave, from
# 2^-16 to 2^16 below the best score.
_COARSE_SHIFT = 20
_FIRST_COARSE_DIGIT = (127 - 16) * 8
_NUM_DIGITS = 256
# However sums were rounded, so much of their total is reached before the total itself.
_ALMOST_ALL = 1 - 2.0**-46

_Weigh = Callable[[Tensor], Tensor]
"""Scores [n] float32 to what each counts for, [n] float64."""


@dataclass(frozen=True)
class _Tokens:
    """Some tokens of this rank, each with the row, among those searched, that it belongs to."""

    rows: Tensor  # int32, broadcasts to scores
    scores: Tensor  # float32

    @classmethod
    def of_maxima(cls, maxima: Tensor) -> _Tokens:
        """The best token of every chunk; maxima: [num_rows, num_columns]."""
        rows = torch.arange(len(maxima), dtype=torch.int32, device=maxima.device)
        return cls(rows.unsqueeze(1), maxima)

    @classmethod
    def near(cls, chunks: ScoreChunks, rows: Tensor, floors: Tensor) -> _Tokens:
        """All tokens of `rows` that reach `floors`, and those that share a chunk with them.

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
    def where(
        cls, chosen: Sequence[bool], values: Sequence[float], device: torch.device | str
    ) -> Limits:
        """The limits of the rows that are chosen."""
        rows = [row for row, is_chosen in enumerate(chosen) if is_chosen]
        limits = [float(values[row]) for row in rows]
        return cls(
            torch.tensor(rows, dtype=torch.int64, device=device),
            torch.tensor(limits, dtype=torch.float64, device=device),
        )

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Truncation:
    """Which rows are cut, and how. The rows that are not cost nothing."""

    min_score: Limits
    top_k: Limits
    top_p: Limits  # of rows without another limit
    top_p_of_rest: Limits  # of rows that another limit cuts first

    @classmethod
    def from_lists(
        cls,
        top_k: Sequence[int],
        top_p: Sequence[float],
        min_scores: Sequence[float],
        device: torch.device | str,
    ) -> Truncation:
        """One entry a row; see SamplingParams, and `min_score` for min_p."""
        has_min = [score > -math.inf for score in min_scores]
        has_k = [k > 0 for k in top_k]
        has_p = [p < 1 for p in top_p]
        is_cut = [k or low for k, low in zip(has_k, has_min, strict=True)]
        only_p = [p and not cut for p, cut in zip(has_p, is_cut, strict=True)]
        p_of_rest = [p and cut for p, cut in zip(has_p, is_cut, strict=True)]
        return cls(
            Limits.where(has_min, min_scores, device),
            Limits.where(has_k, top_k, device),
            Limits.where(only_p, top_p, device),
            Limits.where(p_of_rest, top_p, device),
        )


def min_score(min_p: float) -> float:
    """The score of a token that is `min_p` times as likely as the best one."""
    return math.log(min_p) if min_p > 0 else -math.inf


def support_floors(
    chunks: ScoreChunks, truncation: Truncation, group: TensorParallelGroup
) -> Tensor:
    """The lowest score of each row that its min_p, its top_k and then its top_p let through.

    Scores are logarithms of probabilities relative to the row's best token, so at most 0. Equal
    scores are in or out together; what top_p keeps is a share of what the others left.

    Returns [num_rows] float32, -inf for a row that is not cut, and the same on every rank.
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
    """The highest floors from which on the tokens of `rows` weigh `targets`, [num_rows] float32."""
    bounds = _bounds(_Tokens.of_maxima(chunks.maxima[rows]), targets, weigh, group)
    return _search(_Tokens.near(chunks, rows, bounds), targets, weigh, group)


def _floors_within(
    chunks: ScoreChunks,
    rows: Tensor,  # [num_rows] int64
    floors: Tensor,  # [num_rows] float32
    shares: Tensor,  # [num_rows] float64
    group: TensorParallelGroup,
) -> Tensor:
    """The floors above which lie `shares` of the mass that lies above `floors`."""
    tokens = _Tokens.near(chunks, rows, floors)
    tokens.scores.masked_fill_(tokens.scores < floors[tokens.rows], -torch.inf)
    totals = torch.zeros_like(shares)
    totals.index_add_(0, tokens.rows.squeeze(1), _mass(tokens.scores).sum(1))
    return _search(tokens, group.all_reduce(totals) * shares, _mass, group)


def _total_masses(chunks: ScoreChunks, rows: Tensor) -> Tensor:
    """rows: [num_rows] int64. A slab at a time, as float64 takes much memory."""
    slab_scores = _CPU_SLAB_SCORES if rows.device.type == "cpu" else _SLAB_SCORES
    slabs = rows.split(max(1, slab_scores // chunks.scores[0].numel()))
    return torch.cat([_mass(chunks.scores[slab]).sum((1, 2)) for slab in slabs])


def _bounds(
    maxima: _Tokens,
    targets: Tensor,  # [num_rows] float64
    weigh: _Weigh,
    group: TensorParallelGroup,
) -> Tensor:
    """Scores from which on `maxima` alone weigh `targets`, [num_rows] float32, or else -inf."""
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
    """The highest scores from which on `tokens` weigh `targets`, [num_rows] float32.

    Where all tokens together fall short, the lowest score of those that weigh anything.
    """
    search = _Search.of(tokens, targets, weigh)
    search.settle(_coarse_digits(search.keys), group)
    floors = torch.zeros_like(targets, dtype=torch.int32)
    for shift, mask in zip(_DIGIT_SHIFTS, _DIGIT_MASKS, strict=True):
        floors += search.settle((search.keys >> shift) & mask, group) << shift
    return _scores(floors)


@dataclass
class _Search:
    """The tokens among which the floors still may be, and what those have to weigh."""

    rows: Tensor  # int32, broadcasts to keys
    keys: Tensor  # int32
    weights: Tensor  # float64, like keys
    targets: Tensor  # [num_rows] float64

    @classmethod
    def of(cls, tokens: _Tokens, targets: Tensor, weigh: _Weigh) -> _Search:
        keys = tokens.scores.abs().view(torch.int32)
        return cls(tokens.rows, keys, weigh(tokens.scores), targets)

    def running_weights(self, digits: Tensor, group: TensorParallelGroup) -> Tensor:
        """What all ranks' tokens with a digit below 0, 1, ... weigh, [num_rows, _NUM_DIGITS + 1].

        digits: of the keys, int32, ascending with them.
        """
        sums = self.targets.new_zeros(len(self.targets) * _NUM_DIGITS)
        places = self.rows * _NUM_DIGITS + digits
        sums.index_add_(0, places.flatten(), self.weights.flatten())
        return pad(group.all_reduce(sums).view(-1, _NUM_DIGITS).cumsum(1), (1, 0))

    def settle(self, digits: Tensor, group: TensorParallelGroup) -> Tensor:
        """The digit of each floor, [num_rows] int32. Only tokens that share it are kept."""
        running = self.running_weights(digits, group)
        targets = torch.minimum(self.targets, running[:, -1] * _ALMOST_ALL)
        settled = (running[:, 1:] < targets.unsqueeze(1)).sum(1, keepdim=True)
        self.targets = targets - running.gather(1, settled).squeeze(1)
        settled = settled.squeeze(1).int()
        same = (digits == settled[self.rows]).nonzero(as_tuple=True)
        self.rows = self.rows.expand_as(digits)[same]
        self.keys, self.weights = self.keys[same], self.weights[same]
        return settled


def _coarse_digits(keys: Tensor) -> Tensor:
    return ((keys >> _COARSE_SHIFT) - _FIRST_COARSE_DIGIT).clamp_(0, _NUM_DIGITS - 1)


def _scores(keys: Tensor) -> Tensor:
    return -keys.view(torch.float32)


def _count(scores: Tensor) -> Tensor:
    return torch.ones_like(scores, dtype=torch.float64)


def _mass(scores: Tensor) -> Tensor:
    return scores.double().exp_()
