"""The data types of models, as torch has them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from specdec.config.engine import DTypeName
from specdec.config.kv_cache import FP8_FORMATS, KVCacheDType

DTYPES: Mapping[DTypeName, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)


def kv_dtype_of(dtype: torch.dtype, kv_cache_dtype: KVCacheDType) -> torch.dtype:
    """Return the data type of the KV of a model with activations of `dtype`."""
    if kv_cache_dtype == "auto":
        return dtype
    found: torch.dtype = getattr(torch, FP8_FORMATS[kv_cache_dtype])
    return found
