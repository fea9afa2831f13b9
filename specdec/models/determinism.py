"""Models whose output can be the same bits in any batch."""

from __future__ import annotations

import torch

from specdec.models.config import ModelConfig
from specdec.models.traits import NormKind, QkNorm
from specdec.types.errors import UnsupportedModelError


def require_deterministic(config: ModelConfig, num_ranks: int, device: torch.device) -> None:
    """Raise UnsupportedModelError where some part of a model's pass has no invariant kernel.

    On a CPU the native decoder has one for every part that it runs.
    """
    faults = {"modelling code of transformers": config.transformers is not None}
    if device.type != "cpu":
        traits = config.traits
        faults |= {
            "LayerNorm": traits.norm is not NormKind.RMS,
            "norms over all heads": config.has_qk_norm and traits.qk_norm is QkNorm.ALL_HEADS,
            "several ranks, whose results NCCL adds in an order of its choice": num_ranks > 1,
        }
    if found := [name for name, is_found in faults.items() if is_found]:
        raise UnsupportedModelError(
            f"deterministic does not support {found[0]} on device {device.type}"
        )
