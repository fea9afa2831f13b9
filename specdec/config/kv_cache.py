"""The data types of the KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, get_args

KVCacheDType = Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]
"""`auto`: the data type of the model. `fp8` is `fp8_e4m3`, as in vLLM: 3 bits of mantissa, values
up to 448. `fp8_e5m2`: 2 bits and values up to 57344, for GPUs that cannot convert the first."""

KV_CACHE_DTYPES: tuple[KVCacheDType, ...] = get_args(KVCacheDType)

FP8_FORMATS: Mapping[KVCacheDType, str] = MappingProxyType(
    {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
)
"""torch's name of each 8-bit type."""
