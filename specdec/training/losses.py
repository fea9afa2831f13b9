"""Losses of a draft token's distribution q against the target's p, and weights by position.

A draft token is accepted with probability 1 - TV(p, q) by rejection sampling (Leviathan et al.
2023), and under coupling, where both share their noise, with at least (1 - TV) / (1 + TV)
(Daliri et al. 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from specdec.training.config import LossName

Loss = Callable[[Tensor, Tensor], Tensor]
"""Maps log q and p, [..., V] each, to a loss for each distribution, [...]."""

_ETA = 3.0
_ALPHA = 0.5


def kl(log_q: Tensor, p: Tensor) -> Tensor:
    """Return KL(p || q)."""
    return torch.xlogy(p, p).sum(-1) - (p * log_q).sum(-1)


def cross_entropy(log_q: Tensor, p: Tensor) -> Tensor:
    """Return -log q of the target's most probable token."""
    return -log_q.gather(-1, p.argmax(-1, keepdim=True)).squeeze(-1)


def total_variation(log_q: Tensor, p: Tensor) -> Tensor:
    """Return TV(p, q), one minus the probability of acceptance."""
    return 1 - torch.minimum(log_q.exp(), p).sum(-1)


def lk_hybrid(log_q: Tensor, p: Tensor) -> Tensor:
    """Return w KL + (1 - w) TV, where w = exp(-3 (1 - TV)) falls as acceptance grows.

    TV alone has a vanishing gradient where p and q hardly overlap (arXiv 2602.23881).
    """
    tv = total_variation(log_q, p)
    weight = torch.exp(-_ETA * (1 - tv.detach()))
    return weight * kl(log_q, p) + (1 - weight) * tv


def coupling(log_q: Tensor, p: Tensor) -> Tensor:
    """Return 1 - (1 - TV) / (1 + TV), the bound on the probability of rejection under coupling."""
    tv = total_variation(log_q, p)
    return 2 * tv / (1 + tv)


LOSSES: Mapping[LossName, Loss] = MappingProxyType(
    {
        "kl": kl,
        "ce": cross_entropy,
        "tv": total_variation,
        "lk_hybrid": lk_hybrid,
        "coupling": coupling,
    }
)


def decayed_weights(depth: int, decay: float) -> Tensor:
    """Return decay ** i for draft token i, [depth, 1], as in EAGLE-3's training."""
    return (decay ** torch.arange(depth))[:, None]


def d_pace_weights(log_q: Tensor, p: Tensor) -> Tensor:
    """Return the weight of each draft token by its effect on the accepted length, [depth, R].

    D-PACE (arXiv 2605.18810): with a smoothed probability s_i of draft token i, the weight of token
    j is the sum over m >= j of the product of s_0 to s_m, the accepted tokens that depend on it.
    log_q, p: [depth, R, V].
    """
    smoothed = (1 - _ALPHA) * torch.exp(-cross_entropy(log_q, p)) + _ALPHA
    return smoothed.cumprod(0).flip(0).cumsum(0).flip(0)
