"""Models whose output can be the same bits in any batch."""

from __future__ import annotations

import torch

from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.config.native_limits import native_fault
from specdec.models.config.traits import NormKind, QkNorm
from specdec.types.errors import UnsupportedModelError


def require_deterministic(
    config: ModelConfig, group: TensorParallelGroup, device: torch.device
) -> None:
    """Raise UnsupportedModelError where some part of a model's pass has no invariant kernel.

    On a CPU the native decoder has one for every part that it runs.
    """
    faults = {
        "modelling code of transformers": config.transformers is not None,
    }
    if device.type == "cpu" and (fault := native_fault(config)):
        faults[fault] = True
    if device.type != "cpu":
        traits = config.traits
        faults |= {
            "recurrent layers": config.recurrent is not None,
            "LayerNorm": traits.norm is not NormKind.RMS,
            "norms over all heads": config.has_qk_norm and traits.qk_norm is QkNorm.ALL_HEADS,
            "ranks whose results are added in an order of NCCL's choice": not group.adds_in_order,
        }
    if found := [name for name, is_found in faults.items() if is_found]:
        raise UnsupportedModelError(
            f"deterministic does not support {found[0]} on device {device.type}"
        )
