"""The data types of models, as torch has them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from specdec.config.engine import DTypeName

DTYPES: Mapping[DTypeName, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)
