"""Steps in which a prompt joins sequences that decode, beside the decodes alone.

The step runs on the device, as one pass over the tokens of all rows, and by the operators of the
host, which reads values between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product

from benchmarks.gpu.parts import Context, Result
from benchmarks.gpu.steps import BLOCK_SIZE, GREEDY, Sizes, Steps, model_of
from specdec.types.messages import BlockTableDelta, SequenceAdmission, StepRow

_BATCHES, _PROMPTS, _DRAFTS = (1, 16, 64), (16, 64, 256, 1024), (0, 4)
_CONTEXT = 1024
_MOST_RATIO = 1.5


@dataclass(frozen=True)
class PromptCell:
    """Median milliseconds of steps of `batch` sequences that decode, beside a prompt.

    decode_ms: without the prompt. device_ms, host_ms: with it, on the device and by the host.
    """

    batch: int
    num_drafts: int
    prompt_tokens: int
    decode_ms: float
    device_ms: float
    host_ms: float


def measure_prompts(context: Context) -> Result:
    """Measure a prompt beside decodes of Llama-3.1-8B, by batch, drafts and length."""
    batches, prompts, drafts = _sizes(context)
    length = 32 if context.is_small else _CONTEXT
    decoder, model = model_of(context)
    sizes = Sizes((max(batches) + 1,), (length + max(prompts),), drafts, 2**14)
    steps = Steps(decoder, model, sizes, has_graphs=True)
    cells: list[dict[str, float]] = []
    result: Result = {"graphs": steps.report.describe(), "prompt_cells": cells}
    named = (batches[-1], drafts[0], prompts[min(1, len(prompts) - 1)])
    for shape in product(batches, drafts, prompts):
        cell = _measure(steps, length, *shape)
        cells.append(asdict(cell))
        if shape == named:
            name = f"prompt of {cell.prompt_tokens} beside {cell.batch} decodes, times these"
            ratio = cell.device_ms / cell.decode_ms
            result["aims"] = {name: {"value": ratio, "at_most": _MOST_RATIO}}
        context.save(result)
    return result


def _sizes(context: Context) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """Return batches, prompts and drafts."""
    return ((2,), (16,), (0, 2)) if context.is_small else (_BATCHES, _PROMPTS, _DRAFTS)


def _measure(
    steps: Steps, length: int, batch: int, num_drafts: int, prompt_tokens: int
) -> PromptCell:
    """Measure steps after `length` tokens of each sequence."""
    decodes = steps.begin(batch, length, num_drafts, GREEDY)
    blocks = -(-(length + BLOCK_SIZE) // BLOCK_SIZE)
    table = range(batch * blocks, batch * blocks + -(-prompt_tokens // BLOCK_SIZE) + 1)
    prompt = StepRow(batch, 0, (1,) * prompt_tokens, 0, True)
    admission = SequenceAdmission(batch, prompt_tokens, GREEDY)
    steps.step((prompt,), (admission,), (BlockTableDelta(batch, 0, tuple(table)),))
    rows = (*decodes, prompt)
    cell = PromptCell(
        batch,
        num_drafts,
        prompt_tokens,
        decode_ms=steps.median_ms(steps.runner.execute, decodes),
        device_ms=steps.median_ms(steps.runner.execute, rows),
        host_ms=steps.median_ms(steps.runner.execute_on_host, rows),
    )
    steps.step((), released=tuple(range(batch + 1)))
    return cell
