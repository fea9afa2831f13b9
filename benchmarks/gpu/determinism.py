"""Deterministic mode: the bits of a token in any batch, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

import torch

from benchmarks.gpu.device_kernels import require_triton
from benchmarks.gpu.parts import Context, Result
from benchmarks.gpu.random_models import LLAMA_8B, SMALL, random_decoder, write_config
from benchmarks.gpu.steps import BLOCK_SIZE, FEW, Sizes, cells_of
from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch
from specdec.models.config.model_config import ModelConfig
from specdec.models.llama import CausalDecoder

_SIZES = Sizes((1, 8, 64), (1024,), (0, 4), 2**16)
_MOST_RATIO = 1.4
_CHECKED_LAYERS = 4


def measure_deterministic(context: Context) -> Result:
    """Check bits on a few layers of Llama-3.1-8B; compare steps of the whole with those without."""
    require_triton(context)
    fields = {**(SMALL if context.is_small else LLAMA_8B)}
    directory = context.directory / "deterministic"
    few = write_config(directory, fields | {"num_hidden_layers": _CHECKED_LAYERS})
    result: Result = {"differing_bits": _differing_bits(_decoder(few, context, deterministic=True))}
    result["passed"] = not any(result["differing_bits"].values())
    context.save(result)
    sizes = FEW if context.is_small else _SIZES
    model = write_config(directory, fields)
    cells = {
        name: cells_of(
            partial(_decoder, model, context, deterministic=name == "deterministic"),
            model,
            sizes,
            context,
        )
        for name in ("plain", "deterministic")
    }
    ratios = [
        slow.step_ms / fast.step_ms
        for slow, fast in zip(cells["deterministic"], cells["plain"], strict=True)
    ]
    result["cells"] = [asdict(each) for each in cells["deterministic"]]
    result["ratios"] = ratios
    aim = {"value": max(ratios), "at_most": _MOST_RATIO}
    return result | {"aims": {"deterministic, times a step": aim}}


def _decoder(model: ModelConfig, context: Context, *, deterministic: bool) -> CausalDecoder:
    dtype = torch.bfloat16 if context.is_gpu else torch.float32  # bfloat16 is wrong interpreted
    length = model.max_position_embeddings
    return random_decoder(
        model, context.device, dtype, length, BLOCK_SIZE, deterministic=deterministic
    )


@torch.inference_mode()
def _differing_bits(decoder: CausalDecoder) -> dict[str, int]:
    """Return how many logits of a text differ from those of the text alone, in one step.

    By case: beside others, in two steps, and token by token.
    """
    text = [(31 * index) % 500 + 2 for index in range(70)]
    other = Chunk(text[::-1] * 2, 0, range(20, 40))
    table = range(1, 8)

    def logits(*passes: Sequence[Chunk]) -> torch.Tensor:
        kv_cache = decoder.new_kv_cache(40 * BLOCK_SIZE)
        for chunks in passes:
            hidden = decoder(ForwardBatch(chunks, BLOCK_SIZE), kv_cache)
        return decoder.compute_logits(hidden)[-1]

    alone = logits([Chunk(text, 0, table)])
    found = {
        "beside others": logits([other, Chunk(text, 0, table)]),
        "in two steps": logits([Chunk(text[:40], 0, table)], [Chunk(text[40:], 40, table)]),
        "token by token": logits(
            *([Chunk([token], place, table)] for place, token in enumerate(text))
        ),
    }
    return {name: int((each != alone).sum()) for name, each in found.items()}
