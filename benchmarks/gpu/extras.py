"""Requests with penalties, masks and log-probabilities: their kernel, and what steps cost by them.

The step runs on the device, and by the operators of the host, which it took before for all of its
sequences when a single one had such a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType

import numpy as np
import torch

from benchmarks.gpu.device_kernels import require_triton
from benchmarks.gpu.parts import Context, Result
from benchmarks.gpu.steps import BLOCK_SIZE, GREEDY, Sizes, Steps, model_of
from specdec.kernels.reference.logit_edits import PROMPT_TOKEN, Change, Entry, LogitEdits
from specdec.sampling.row_ops import row_ops_of
from specdec.types.messages import BlockTableDelta, SequenceAdmission, StepRow
from specdec.types.sampling.sampling_spec import SamplingRules

_BATCH, _CONTEXT, _NUM_DRAFTS = 256, 512, 4
_MOST_RATIO = 1.1
_PENALTIES = SamplingRules(temperature=0.0, presence_penalty=0.5, repetition_penalty=1.1)
_LOGPROBS = SamplingRules(temperature=0.0, logprobs=5)
_RULES: Mapping[str, SamplingRules] = MappingProxyType(
    {"penalties": _PENALTIES, "log-probabilities": _LOGPROBS, "grammar": GREEDY}
)


@dataclass(frozen=True)
class ExtrasCell:
    """Median milliseconds of a step of `batch` sequences, `num_rows` of which have a request."""

    batch: int
    request: str
    num_rows: int
    device_ms: float
    host_ms: float


def measure_extras(context: Context) -> Result:
    """Measure decodes of Llama-3.1-8B with drafts, of which none, one and all have a request."""
    batch, length = (2, 32) if context.is_small else (_BATCH, _CONTEXT)
    decoder, model = model_of(context)
    sizes = Sizes((batch,), (length,), (_NUM_DRAFTS,), 2**14)
    steps = Steps(decoder, model, sizes, has_graphs=True)
    cells: list[ExtrasCell] = []
    result: Result = {}
    shapes = [("none", 0), *((name, rows) for rows in (1, batch) for name in _RULES)]
    for name, num_rows in shapes:
        cells.append(_measure(steps, batch, length, name, num_rows))
        ratios = [each.device_ms / cells[0].device_ms for each in cells if each.num_rows == 1]
        result = {"extras_cells": [asdict(each) for each in cells]}
        if ratios:
            aim = {"value": max(ratios), "at_most": _MOST_RATIO}
            result["aims"] = {f"one request in {batch}, times a step without": aim}
        context.save(result)
    return result


def _measure(steps: Steps, batch: int, length: int, name: str, num_rows: int) -> ExtrasCell:
    blocks = -(-(length + BLOCK_SIZE) // BLOCK_SIZE)
    rules = [_RULES[name] if seq < num_rows else GREEDY for seq in range(batch)]
    admitted = tuple(
        SequenceAdmission(seq, length, each, (1,) * length if each.needs_tokens else ())
        for seq, each in enumerate(rules)
    )
    tables = tuple(
        BlockTableDelta(seq, 0, tuple(range(seq * blocks, (seq + 1) * blocks)))
        for seq in range(batch)
    )
    size = (1 + _NUM_DRAFTS, -(-len(steps.runner.model.vocab_slice) // 32))
    masks = [
        np.full(size, -1, np.int32) if name == "grammar" and seq < num_rows else None
        for seq in range(batch)
    ]
    rows = tuple(
        StepRow(seq, length, (1,) * (1 + _NUM_DRAFTS), _NUM_DRAFTS, True, grammar_mask=mask)
        for seq, mask in enumerate(masks)
    )
    steps.step(rows, admitted, tables)
    cell = ExtrasCell(
        batch,
        name,
        num_rows,
        device_ms=steps.median_ms(steps.runner.execute, rows),
        host_ms=steps.median_ms(steps.runner.execute_on_host, rows),
    )
    steps.step((), released=tuple(range(batch)))
    return cell


def check_edits(context: Context) -> Result:
    """Compare penalties, biases and masks on the device with the reference, bit for bit.

    The bits of a NaN are not compared: the same operation gives another one on a CPU.
    """
    require_triton(context)
    vocab = 5000 if context.is_small else 128256
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, vocab, generator=generator) * 4
    logits[2, 5], logits[3, 6], logits[4, 7] = torch.nan, torch.inf, -torch.inf
    paths = torch.randint(-1, vocab, (48, 8), generator=generator)
    found, expected = (
        _edited(logits, paths, device) for device in (context.device, torch.device("cpu"))
    )
    is_equal = found.view(torch.int32) == expected.view(torch.int32)
    num_differing = int((~(is_equal | (found.isnan() & expected.isnan()))).sum())
    return {"passed": num_differing == 0, "num_differing": num_differing}


def _edited(logits: torch.Tensor, paths: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the changed logits, computed on a device."""
    own = logits.to(device, copy=True)
    edits = _random_edits(len(paths), logits.shape[1], device)
    positions = torch.arange(len(logits), device=device)
    row_ops_of("auto", device).edit(own, edits, paths.to(device), positions, 0)
    return own.cpu()


def _random_edits(num_rows: int, vocab: int, device: torch.device) -> LogitEdits:
    generator = torch.Generator().manual_seed(1)
    changes = torch.empty(num_rows, len(Change), dtype=torch.int64)
    places = torch.arange(num_rows)
    changes[:, Change.ROW], changes[:, Change.PLACE] = places, places % 9 - 1
    changes[:, Change.MASK] = places % 5 - 1
    penalties = torch.rand(num_rows, 3, generator=generator, dtype=torch.float64) + 0.5
    changes.view(torch.float64)[:, Change.REPETITION :] = penalties
    counts = torch.randint(4, (8, vocab), generator=generator)
    is_prompt = torch.rand(8, vocab, generator=generator) < 0.1
    size = (4, -(-vocab // 32))
    masks = torch.randint(-(2**31), 2**31 - 1, size, generator=generator, dtype=torch.int32)
    entries = torch.empty(20, len(Entry), dtype=torch.int64)
    entries[:, Entry.ROW], entries[:, Entry.COLUMN] = torch.arange(20), torch.arange(20) * 7
    biased = entries.clone()
    biased.view(torch.float64)[:, Entry.VALUE] = 1.25
    entries[:, Entry.VALUE] = 10
    seen = (counts + PROMPT_TOKEN * is_prompt).to(torch.int32)
    return LogitEdits(*(each.to(device) for each in (changes, masks, biased, entries, seen)))
