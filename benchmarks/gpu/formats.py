"""Steps of 8B whose KV or weights have fewer bits, beside those in 16 bits."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from types import MappingProxyType
from typing import Any

import torch

from benchmarks.gpu.parts import Context, Result, failure
from benchmarks.gpu.random_models import LLAMA_8B, SMALL, random_decoder, write_config
from benchmarks.gpu.steps import BLOCK_SIZE, FEW, GREEDY, Cell, Sizes, Steps
from specdec.models.config.model_config import ModelConfig
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
    for name, options in FORMATS.items():
        try:
            result["formats"][name] = [
                asdict(each) | {"ratio": each.ratio}
                for each in _cells(model, sizes, context, options)
            ]
        except Exception as error:  # a GPU may lack a type; the other formats stay
            result["formats"][name] = failure(error)
        context.save(result)
    return result


def _cells(
    model: ModelConfig, sizes: Sizes, context: Context, options: Mapping[str, Any]
) -> Sequence[Cell]:
    dtype = DTYPES["bfloat16" if context.is_gpu else "float32"]
    length = model.max_position_embeddings
    decoder = random_decoder(model, context.device, dtype, length, BLOCK_SIZE, **options)
    steps = Steps(decoder, model, sizes, has_graphs=True)
    shapes = product(sizes.batches, sizes.contexts, sizes.drafts)
    found = [steps.measure(*shape, GREEDY) for shape in shapes if steps.fits(*shape[:2])]
    del steps, decoder
    gc.collect()
    if context.is_gpu:
        torch.cuda.empty_cache()
    return found
