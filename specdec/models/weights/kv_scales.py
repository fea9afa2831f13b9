"""Scales of cached keys and values, as checkpoints with a quantized KV cache store them.

A layer has one number for its keys and one for its values, under one of these names after
`self_attn.`:

- `k_scale` and `v_scale`: compressed-tensors today, and Quark;
- `k_proj.k_scale` and `v_proj.v_scale`: ModelOpt;
- `k_proj.output_scale` and `v_proj.output_scale`: compressed-tensors before;
- `kv_scale`: AutoFP8, one for both.
"""

from __future__ import annotations

import math

from specdec.kernels.reference.kv_scales import UNIT_SCALES, KVScales
from specdec.models.weights.stored_tensors import TensorSource
from specdec.types.errors import UnsupportedModelError

_NAMES = (
    ("k_scale", "v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("kv_scale", "kv_scale"),
)


def read_kv_scales(tensors: TensorSource, prefix: str) -> KVScales:
    """Return the scales of a layer's attention; 1 where the checkpoint has none.

    prefix: of the tensors of the attention, without a dot at its end. Raises UnsupportedModelError
    for scales by head, and for those that are not positive numbers.
    """
    for key, value in _NAMES:
        if f"{prefix}.{key}" in tensors:
            return KVScales(
                _number(tensors, f"{prefix}.{key}"), _number(tensors, f"{prefix}.{value}")
            )
    return UNIT_SCALES


def _number(tensors: TensorSource, name: str) -> float:
    shape = tensors.shape(name)
    if math.prod(shape) != 1:
        raise UnsupportedModelError(f"{name} has shape {list(shape)}; expected one for the layer")
    found = float(tensors.slice(name, *[slice(None)] * len(shape)).float())
    if not (math.isfinite(found) and found > 0):
        raise UnsupportedModelError(f"{name} is {found}; it must be a positive number")
    return found
