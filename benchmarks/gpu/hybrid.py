"""Recurrent kernels against torch's, and steps of a hybrid of 9B beside its memory floor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.device_kernels import compared, name_of, require_triton
from benchmarks.gpu.parts import Case, Context, Result, run_cases
from benchmarks.gpu.random_models import SMALL, random_decoder, write_config
from benchmarks.gpu.steps import BLOCK_SIZE, FEW, GREEDY, Sizes, Steps
from specdec.kernels.backend import KernelBackend, recurrence_kernels
from specdec.kernels.reference.device_states import DeviceStatePool
from specdec.kernels.reference.forward_batch import Chunk, ForwardBatch
from specdec.kernels.reference.recurrent.recurrence import LayerStates
from specdec.kernels.reference.state_pool import StatePool
from specdec.models.config.model_config import ModelConfig
from specdec.models.hybrid import HybridDecoder
from specdec.models.layers.recurrences.gated_delta import GatedDeltaLayer
from specdec.types.messages import StepRow

_HYBRID: Mapping[str, Any] = {
    **SMALL,
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "full_attention_interval": 4,
}
_HYBRID_9B: Mapping[str, Any] = {
    **_HYBRID,
    "vocab_size": 248320,
    "max_position_embeddings": 32768,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
"""Three of four layers are Gated DeltaNet, with the sizes of heads that are the defaults."""
_SMALL: Mapping[str, Any] = {
    **_HYBRID,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_SIZES = Sizes((1, 8), (1024,), (0, 7), 4096)


_HEADS: Mapping[str, Any] = {**_HYBRID, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
"""Heads of published sizes in a small model."""


def check_recurrent_kernels(context: Context) -> Result:
    """Compare a Gated DeltaNet on Triton's kernels with torch's: a prompt, drafts, a replay."""
    require_triton(context)
    model = write_config(context.directory / "heads", _SMALL if context.is_small else _HEADS)
    cases: list[Case] = [
        (name_of(dtype), partial(check_recurrence, model, dtype, context.device))
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    ]
    return run_cases(cases, context)


def check_recurrence(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> Result:
    """Compare the outputs of a layer, and the states after them."""
    decoder = random_decoder(model, device, dtype, model.max_position_embeddings, BLOCK_SIZE)
    layer = next(each for each in decoder.modules() if isinstance(each, GatedDeltaLayer))
    found = _outputs(model, layer, dtype, device, DeviceStatePool)
    return compared(found, _outputs(model, layer, dtype, device, StatePool), dtype)


@torch.inference_mode()
def _outputs(
    model: ModelConfig,
    layer: GatedDeltaLayer,
    dtype: torch.dtype,
    device: torch.device,
    kind: type[StatePool],
) -> Tensor:
    """Return the outputs of passes of a layer, then its state, as one row."""
    assert model.recurrent is not None
    shape = model.recurrent.kind.state(model.recurrent.units(0, 1))
    sizes = (shape.window, shape.num_inputs, shape.memory)
    pool = kind(1, *sizes, num_slots=2, max_guesses=8, dtype=dtype, device=device)
    is_triton, found = isinstance(pool, DeviceStatePool), list[Tensor]()
    kernels = recurrence_kernels(KernelBackend.TRITON if is_triton else KernelBackend.TORCH)
    generator = torch.Generator().manual_seed(0)
    for start, num_tokens, num_guesses in ((0, 40, 0), (40, 9, 8), (46, 9, 8), (55, 1, 0)):
        chunk = Chunk([0] * num_tokens, start, [0], num_guesses=num_guesses, state_slot=1)
        batch = ForwardBatch([chunk], BLOCK_SIZE)
        plan = pool.plan_batch(batch) if isinstance(pool, DeviceStatePool) else pool.plan(batch)
        inputs = torch.randn(num_tokens, shape.num_inputs, generator=generator).to(device, dtype)
        states = LayerStates(pool, 0, plan)
        mixed = kernels.convolve(inputs, layer.convolution, states)
        own = kernels.run_delta(mixed, layer.rule, states)
        gates = inputs[:, -layer.outputs :]
        found.append(kernels.gate_heads(own, gates, layer.head_norm).flatten().float())
    return torch.cat([*found, pool.memory[0, 1].flatten()])


class _Replaying(Steps):
    """Steps of which each replays drafts that the one before it has had accepted."""

    num_replayed = 0

    def run_rows(self, rows: tuple[StepRow, ...]) -> None:
        """See Steps. A state is committed at the position after the last known token."""
        if self.num_replayed and isinstance(self.states, DeviceStatePool):
            self.states.committed -= 1 + self.num_replayed
        super().run_rows(rows)


def measure_hybrid(context: Context) -> Result:
    """Measure greedy steps, with drafts also after a step whose drafts were all accepted.

    floor_ms: of reading the weights and the KV, and of reading and writing the states.
    """
    sizes = FEW if context.is_small else _SIZES
    model = write_config(context.directory / "hybrid", _SMALL if context.is_small else _HYBRID_9B)
    length = model.max_position_embeddings
    decoder = random_decoder(model, context.device, torch.bfloat16, length, BLOCK_SIZE)
    assert isinstance(decoder, HybridDecoder)
    steps = _Replaying(decoder, model, sizes, has_graphs=True)
    result: Result = {"cells": [], "weight_bytes": steps.weight_bytes, "aims": {}}
    result["passed"] = decoder.has_fixed_shapes or not context.is_gpu
    for batch in sizes.batches:
        for num_drafts in sizes.drafts:
            for steps.num_replayed in (0, num_drafts) if num_drafts else (0,):
                cell = steps.measure(batch, sizes.contexts[0], num_drafts, GREEDY)
                replayed = {"num_replayed": steps.num_replayed, "ratio": cell.ratio}
                result["cells"].append(asdict(cell) | replayed)
                result["aims"] = _aims(result["cells"])
                context.save(result)
    return result


def _aims(cells: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the aims of steps of one sequence: value and limit."""
    one = next(each for each in cells if each["num_drafts"] == 0)
    one_ms = one["ahead_ms"] or one["step_ms"]
    found = {"hybrid, times the floor": {"value": one_ms / one["floor_ms"], "at_most": 1.35}}
    for each in cells:
        if each["batch"] == 1 and each["num_drafts"]:
            name = f"hybrid, rows of drafts, {each['num_replayed']} replayed, times a step"
            found[name] = {"value": each["step_ms"] / one["step_ms"], "at_most": 1.2}
    return found
