"""Steps of 8B whose KV or weights have fewer bits, beside those in 16 bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from types import MappingProxyType
from typing import Any

from benchmarks.gpu.parts import Context, Result, failure
from benchmarks.gpu.random_models import LLAMA_8B, SMALL, random_decoder, write_config
from benchmarks.gpu.steps import BLOCK_SIZE, FEW, Sizes, cells_of
from specdec.models.dtypes import DTYPES

_SIZES = Sizes((1, 8, 64), (1024, 8192), (0, 5), 2**20)
FORMATS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "16 bits": {},
        "KV in fp8": {"kv_cache_dtype": "fp8"},
        "weights in fp8": {"stores_float8": True},
        "weights in int8": {"quantization": "int8"},
        "weights in int4": {"quantization": "int4"},
    }
)
"""Arguments of `random_decoder`."""


def measure_formats(context: Context) -> Result:
    """Measure steps of Llama-3.1-8B in each format; one that fails leaves the others."""
    sizes, fields = (FEW, SMALL) if context.is_small else (_SIZES, LLAMA_8B)
    model = write_config(context.directory / "formats", fields)
    result: Result = {"formats": {}}
    dtype = DTYPES["bfloat16" if context.is_gpu else "float32"]
    length = model.max_position_embeddings
    for name, options in FORMATS.items():
        make = partial(random_decoder, model, context.device, dtype, length, BLOCK_SIZE, **options)
        try:
            result["formats"][name] = [
                asdict(each) | {"ratio": each.ratio}
                for each in cells_of(make, model, sizes, context)
            ]
        except Exception as error:  # a GPU may lack a type; the other formats stay
            result["formats"][name] = failure(error)
        context.save(result)
    return result
