"""Scores of rows of logits, and min-p, top-k and top-p on them: the definition, in torch.

A floor is found by a radix select over the bits of the score: float32 numbers of one sign order
like their bits. Rows are whole: several ranks exchange them (`row_exchange`). Shapes are fixed, so
that a device needs no value from the host; on the host itself, which may read values, the search
goes on with the tokens that are left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.sampling.gumbel import CHUNK_TOKENS

_LOWEST = torch.finfo(torch.float32).min

# Keys are the bits of -score as float32. -score is not negative, so keys ascend as scores descend.
# The digits of a key, by their lowest bit: the exponent first.
_DIGIT_SHIFTS = (23, 15, 7, 0)
_DIGIT_MASKS = (0xFF, 0xFF, 0xFF, 0x7F)
_NUM_DIGITS = 256
# This fraction of the total is reached before the total itself, for any rounding of the sums.
_ALMOST_ALL = 1 - 2.0**-46


@dataclass(frozen=True)
class DeviceLimits:
    """Truncation of each row of logits; rows without a limit have its neutral value."""

    top_k: Tensor  # [num_rows] int64; 0: off
    top_p: Tensor  # [num_rows] float64; 1: off
    min_scores: Tensor  # [num_rows] float32, log(min_p); -inf: off

    def __getitem__(self, rows: slice) -> DeviceLimits:
        return DeviceLimits(self.top_k[rows], self.top_p[rows], self.min_scores[rows])


def min_score(min_p: float) -> float:
    """Return the score of a token that is `min_p` times as likely as the best one."""
    return math.log(min_p) if min_p > 0 else -math.inf


def scaled_scores(logits: Tensor, temperatures: Tensor, group: TensorParallelGroup) -> Tensor:
    """Return log(probability / probability of the row's best token), [num_rows, n] float32.

    logits: [num_rows, n], of this rank and any float type; NaN counts as -inf. temperatures:
    [num_rows] float32, above 0. A collective call. The row maximum is subtracted before the
    division, so that a temperature near 0 does not overflow and the best scores are near 0, where
    float32 is dense.
    """
    scores = logits.to(torch.float32, copy=True).nan_to_num_(nan=-torch.inf, neginf=-torch.inf)
    maxima = group.all_gather(scores.amax(1)).amax(0).clamp(min=_LOWEST)
    return scores.sub_(maxima.unsqueeze(1)).div_(temperatures.unsqueeze(1))


def truncation_floors(scores: Tensor, limits: DeviceLimits, *, on_host: bool = False) -> Tensor:
    """Return the lowest score of each row that passes min_p, top_k and then top_p.

    Equal scores are kept or removed together; top_p applies to the mass that the others leave.

    scores: [num_rows, vocab_size] float32, logarithms of probabilities relative to the row's best
    token. on_host: whether values may be read, to save work. Returns [num_rows] float32, -inf for a
    row that is not truncated.
    """
    floors = limits.min_scores
    for is_share, own in ((False, limits.top_k), (True, limits.top_p)):
        is_cut = own < 1 if is_share else own > 0
        if not on_host or is_cut.any():
            least = floors.masked_fill(~is_cut, torch.inf) if on_host else floors
            found = _floors(scores, least, own.double(), is_share=is_share, on_host=on_host)
            floors = torch.where(is_cut, torch.maximum(floors, found), floors)
    return floors


def _floors(
    scores: Tensor, least: Tensor, limits: Tensor, *, is_share: bool, on_host: bool
) -> Tensor:
    """Return the highest score of each row down to which the tokens reach its limit, [num_rows].

    If all tokens together do not, the lowest score of a token that counts. least: [num_rows],
    scores below which none counts. limits: [num_rows] float64, a number of tokens, or with
    is_share a share of their mass.
    """
    if on_host:
        rows, tokens, weights, targets = _near(scores, least, limits, is_share=is_share)
    else:
        rows, tokens = torch.arange(len(scores), device=scores.device).unsqueeze(1), scores
        weights = _weights(scores, least, is_share=is_share)
        targets = weights.sum(1) * limits if is_share else limits
    keys, floors = tokens.abs().view(torch.int32), torch.zeros_like(limits, dtype=torch.int32)
    for shift, mask in zip(_DIGIT_SHIFTS, _DIGIT_MASKS, strict=True):
        digits = (keys >> shift) & mask
        sums = weights.new_zeros(len(limits) * _NUM_DIGITS)
        sums.index_add_(0, (rows * _NUM_DIGITS + digits).flatten(), weights.flatten())
        running = pad(sums.view(-1, _NUM_DIGITS).cumsum(1), (1, 0))
        targets = torch.minimum(targets, running[:, -1] * _ALMOST_ALL)
        digit = (running[:, 1:] < targets.unsqueeze(1)).sum(1)
        targets = targets - running.gather(1, digit.unsqueeze(1)).squeeze(1)
        floors += digit.int() << shift
        is_left = digits == digit[rows]
        if on_host:
            rows, keys, weights = (each[is_left] for each in (rows, keys, weights))
        else:
            weights = weights * is_left
    return -floors.view(torch.float32)


def _near(
    scores: Tensor, least: Tensor, limits: Tensor, *, is_share: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return rows, scores and weights of the tokens among which floors are, then their targets.

    Arguments as in `_floors`. The best tokens of chunks alone bound a floor, unless the tokens that
    count are few.
    """
    bounds, targets = least, limits
    has_few = is_share and bool((least > -torch.inf).all())
    if not has_few:
        if is_share:
            targets = limits * _weights(scores, least, is_share=True).sum(1)
        bounds = torch.maximum(least, _bounds(scores, least, targets, is_share=is_share))
    rows, columns = (scores >= bounds.unsqueeze(1)).nonzero().unbind(1)
    tokens = scores[rows, columns]
    weights = _weights(tokens, least[rows], is_share=is_share)
    if has_few:
        targets = limits * torch.zeros_like(limits).index_add_(0, rows, weights)
    return rows, tokens, weights, targets


def _bounds(scores: Tensor, least: Tensor, targets: Tensor, *, is_share: bool) -> Tensor:
    """Return scores down to which the best tokens of chunks weigh `targets`, [num_rows]; or -inf.

    Arguments as in `_floors`.
    """
    size = scores.shape[1] // CHUNK_TOKENS
    chunks = scores[:, : size * CHUNK_TOKENS].unflatten(1, (size, CHUNK_TOKENS))
    best = chunks.amax(2).sort(dim=1, descending=True).values
    running = _weights(best, least, is_share=is_share).cumsum(1)
    num_before = (running < targets.unsqueeze(1)).sum(1, keepdim=True)
    return pad(best, (0, 1), value=-torch.inf).gather(1, num_before).squeeze(1)


def _weights(scores: Tensor, least: Tensor, *, is_share: bool) -> Tensor:
    """Return the masses of tokens, or 1, in float64; 0 where they do not count.

    scores: [num_rows, n], or flat like least.
    """
    least = least if scores.dim() == 1 else least.unsqueeze(1)
    if is_share:
        return scores.masked_fill(scores < least, -torch.inf).double().exp_()
    return (scores >= least).double()
