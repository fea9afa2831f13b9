"""Losses of a draft token's distribution q against the target's p, and weights by position.

A draft token is accepted with probability 1 - TV(p, q) by rejection sampling (Leviathan et al.
2023), and under coupling, where both share their noise, with at least (1 - TV) / (1 + TV)
(Daliri et al. 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.training.data.config import LossName

_ETA = 3.0
_ALPHA = 0.5


class Teacher(NamedTuple):
    """The target's distributions p, of any number of draft tokens.

    negative_entropy: the sum of p log p.
    """

    p: Tensor  # [..., V]
    negative_entropy: Tensor  # [...]

    @classmethod
    def of_logits(cls, logits: Tensor) -> Teacher:
        """Return the softmax of logits [..., V], without a gradient."""
        log_p = logits.detach().float().log_softmax(-1)
        p = log_p.exp()
        return cls(p, (p * log_p).sum(-1))


Loss = Callable[[Tensor, Teacher], Tensor]
"""Maps log q [..., V] and p to a loss for each distribution, [...]."""


def kl(log_q: Tensor, target: Teacher) -> Tensor:
    """Return KL(p || q)."""
    return target.negative_entropy - (target.p * log_q).sum(-1)


def cross_entropy(log_q: Tensor, target: Teacher) -> Tensor:
    """Return -log q of the target's most probable token."""
    return -log_q.gather(-1, target.p.argmax(-1, keepdim=True)).squeeze(-1)


def total_variation(log_q: Tensor, target: Teacher) -> Tensor:
    """Return TV(p, q), one minus the probability of acceptance."""
    excess = log_q.exp() - target.p
    return (excess * (excess.detach() > 0)).sum(-1)  # a relu whose backward pass is vectorized


def lk_hybrid(log_q: Tensor, target: Teacher) -> Tensor:
    """Return w KL + (1 - w) TV, where w = exp(-3 (1 - TV)) falls as acceptance grows.

    TV alone has a vanishing gradient where p and q hardly overlap (arXiv 2602.23881).
    """
    tv = total_variation(log_q, target)
    weight = torch.exp(-_ETA * (1 - tv.detach()))
    return weight * kl(log_q, target) + (1 - weight) * tv


def coupling(log_q: Tensor, target: Teacher) -> Tensor:
    """Return 1 - (1 - TV) / (1 + TV), the bound on the probability of rejection under coupling."""
    tv = total_variation(log_q, target)
    return 2 * tv / (1 + tv)


def dspark(log_q: Tensor, target: Teacher) -> Tensor:
    """Return 0.1 times the cross entropy plus 0.9 times the L1 distance, which is 2 TV (DSpark)."""
    distance = 2 * total_variation(log_q, target)
    return 0.1 * cross_entropy(log_q, target) + 0.9 * distance


LOSSES: Mapping[LossName, Loss] = MappingProxyType(
    {
        "kl": kl,
        "ce": cross_entropy,
        "tv": total_variation,
        "lk_hybrid": lk_hybrid,
        "coupling": coupling,
        "dspark": dspark,
    }
)


SAMPLED_LOSSES: tuple[LossName, ...] = ("kl", "tv", "lk_hybrid", "coupling")
"""Those that compare sums over all tokens: the others read the target's most probable one, which a
sample of the tokens may lack."""


def confidence_loss(log_odds: Tensor, log_q: Tensor, target: Teacher) -> Tensor:
    """Return the cross entropy of a predicted probability of acceptance with that of q, [...].

    log_odds: of the prediction, [...]. The probability is 1 - TV(p, q); q gets no gradient.
    """
    acceptance = 1 - total_variation(log_q.detach(), target)
    return F.binary_cross_entropy_with_logits(log_odds.float(), acceptance, reduction="none")


def decayed_weights(depth: int, decay: float) -> Tensor:
    """Return decay ** i for draft token i, [depth, 1], as in EAGLE-3's training."""
    return (decay ** torch.arange(depth))[:, None]


def d_pace_weights(log_q: Tensor, target: Teacher, is_trained: Tensor) -> Tensor:
    """Return the weight of each draft token by its effect on the acceptance length, [depth, R].

    D-PACE (arXiv 2605.18810): with a smoothed probability s_i of draft token i, the weight of token
    j is the sum over m >= j of the product of s_0 to s_m, the accepted tokens that depend on it.
    log_q: [depth, R, V]. is_trained: [depth, R] bool; draft tokens without it are never accepted.
    """
    smoothed = (1 - _ALPHA) * torch.exp(-cross_entropy(log_q, target)) + _ALPHA
    return (smoothed * is_trained).cumprod(0).flip(0).cumsum(0).flip(0)
