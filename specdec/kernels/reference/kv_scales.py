"""KV caches of 8-bit floats: their scales, and the conversion of keys and values in torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class KVScales(NamedTuple):
    """Factors of one layer's cached keys and values: the cache has values divided by them."""

    key: float = 1.0
    value: float = 1.0


UNIT_SCALES = KVScales()


def is_quantized(kv_cache: Tensor) -> bool:
    """Return whether a cache has 8-bit floats."""
    return kv_cache.element_size() == 1


def stored_values(kv: Tensor, dtype: torch.dtype, scales: KVScales) -> Tensor:
    """Return keys and values [T, kv_parts, kv_heads, head_dim] as a cache of type `dtype` has them.

    With one part, a latent that is key and value, it has the scale of keys.

    Values of 8-bit types are divided by their scale and clamped to the largest one: a type without
    infinities would store NaN.
    """
    if dtype.itemsize > 1:
        return kv.to(dtype)
    largest = torch.finfo(dtype).max
    parts = zip(kv.float().unbind(1), scales[: kv.shape[1]], strict=True)
    divided = [part / scale for part, scale in parts]
    return torch.stack(divided, 1).clamp_(-largest, largest).to(dtype)


def as_bytes(kv_cache: Tensor) -> Tensor:
    """Return a view of a cache that torch can index: as bytes where it has 8-bit floats."""
    return kv_cache.view(torch.uint8) if is_quantized(kv_cache) else kv_cache
