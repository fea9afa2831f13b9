"""Cost of a draft token beside a step: of a 1B draft model and of an EAGLE-3 head for 8B.

Weights are random, so nothing is accepted; the time of a draft does not depend on that.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

import torch

from benchmarks.gpu.parts import Context, Result
from benchmarks.gpu.profiled import profile
from benchmarks.gpu.random_models import LLAMA_1B, LLAMA_8B, SMALL, random_decoder, write_config
from benchmarks.gpu_steps import median_s
from benchmarks.random_heads import write_eagle3
from specdec.config.engine import DraftLimits, EngineConfig
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config import ModelConfig
from specdec.models.heads.config import HeadConfig
from specdec.models.heads.loading import load_head
from specdec.text.grammar import GrammarCompiler
from specdec.types.messages import (
    BlockTableDelta,
    DraftRow,
    DraftStep,
    SequenceAdmission,
    StepInput,
    StepRow,
)
from specdec.types.sampling_spec import SamplingRules
from specdec.worker import DraftModelRunner, TargetModelRunner
from specdec.worker.draft_grammars import DraftGrammars
from specdec.worker.step_graphs import CudaGraphs

_BLOCK_SIZE, _NUM_BLOCKS, _CONTEXT, _NUM_DRAFTS, _ROUNDS = 16, 64, 256, 5, 10
_BATCHES = (1, 8)
_MAX_HEAD_MS, _MAX_DRAFT_RATIO = 0.35, 1.3


def measure_draft_model(context: Context) -> Result:
    """Measure a draft of five tokens by a model of the sizes of Llama-3.2-1B."""
    model = write_config(context.directory / "draft", SMALL if context.is_small else LLAMA_1B)
    decoder = _decoder(model, context)
    compiler = cast(GrammarCompiler, None)  # no sequence has a grammar
    runner = DraftModelRunner(
        decoder,
        TensorParallelGroup(),
        num_blocks=_NUM_BLOCKS * max(_BATCHES),
        block_size=_BLOCK_SIZE,
        vocab_size=model.vocab_size,
        grammars=DraftGrammars(compiler),
        has_padding_block=True,
    )
    may_capture = context.is_gpu and decoder.fits_graphs
    limits = DraftLimits(
        num_blocks=_NUM_BLOCKS * max(_BATCHES),
        block_size=_BLOCK_SIZE,
        max_model_len=_NUM_BLOCKS * _BLOCK_SIZE,
        max_catch_up_tokens=_CONTEXT,
        max_num_seqs=max(_BATCHES),
    )
    backend = CudaGraphs(context.device) if may_capture else None
    report = runner.use_device_steps(limits, backend)
    result: Result = {"graphs": report.describe(), "ms_per_token": {}, "profiles": {}}
    for batch in _BATCHES:
        found = result["ms_per_token"], result["profiles"]
        found[0][batch], found[1][f"batch {batch}"] = _draft_ms(runner, batch, context)
        result["aims"] = _draft_aims(result["ms_per_token"], result["profiles"])
        context.save(result)
    return result


def _draft_aims(
    ms_per_token: dict[int, float], profiles: dict[str, Result]
) -> dict[str, dict[str, float]]:
    """Return the time of a draft token over that of the device alone, if it is known."""
    found = {}
    for batch, value in ms_per_token.items():
        device_ms = profiles[f"batch {batch}"].get("device_ms")
        if device_ms:
            ratio = value * _NUM_DRAFTS / device_ms
            found[f"draft model at batch {batch}, times its device time"] = {
                "value": ratio,
                "at_most": _MAX_DRAFT_RATIO,
            }
    return found


def measure_head(context: Context) -> Result:
    """Measure the drafts of an EAGLE-3 head behind a step, as the difference to a step without."""
    model = write_config(context.directory / "target", SMALL if context.is_small else LLAMA_8B)
    decoder = _decoder(model, context)
    directory = context.directory / "eagle3"
    if not directory.exists():
        write_eagle3(directory, model)
    runner = TargetModelRunner(
        decoder,
        TensorParallelGroup(),
        num_blocks=_NUM_BLOCKS * max(_BATCHES),
        block_size=_BLOCK_SIZE,
        vocab_size=model.vocab_size,
    )
    limits = EngineConfig(_NUM_BLOCKS * _BLOCK_SIZE, _NUM_BLOCKS * max(_BATCHES), _BLOCK_SIZE)
    head = load_head(HeadConfig.from_directory(directory, model), decoder)
    runner.use_head(head, limits, _refuse)
    found: dict[int, float] = {}
    profiles: Result = {}
    for batch in _BATCHES:
        found[batch], profiles[f"batch {batch}"] = _head_ms(runner, batch, context)
        context.save({"ms_per_token": found, "profiles": profiles})
    aims = {"draft step of an EAGLE-3 head, ms": {"value": found[1], "at_most": _MAX_HEAD_MS}}
    return {"ms_per_token": found, "profiles": profiles, "aims": aims}


def _decoder(model: ModelConfig, context: Context) -> Any:
    return random_decoder(
        model, context.device, torch.bfloat16, _NUM_BLOCKS * _BLOCK_SIZE, _BLOCK_SIZE
    )


def _refuse(directory: Path) -> NoReturn:
    raise AssertionError(f"no version of the head is loaded from {directory}")


def _draft_ms(runner: DraftModelRunner, batch: int, context: Context) -> tuple[float, Result]:
    """Return milliseconds of a draft token, with that of the pending token, and a profile."""
    admissions, tables = _sequences(batch)
    ids = range(batch)
    prompts = tuple(StepRow(seq, 0, (1,) * _CONTEXT, 0, False) for seq in ids)
    rows = tuple(DraftRow(seq, _CONTEXT, (1,), _NUM_DRAFTS, _CONTEXT + 1) for seq in ids)
    first = DraftStep(0, (), admissions, tables, prompts, ())
    runner.draft(first)
    runner.catch_up(first)
    step = DraftStep(1, (), (), (), (), rows)
    seconds = median_s(lambda: runner.draft(step), context.device, _ROUNDS)
    kernels = profile(lambda: runner.draft(step), context.device)
    runner.draft(DraftStep(2, tuple(ids), (), (), (), ()))
    return seconds / _NUM_DRAFTS * 1e3, kernels


def _head_ms(runner: TargetModelRunner, batch: int, context: Context) -> tuple[float, Result]:
    """Return milliseconds of a draft token, and a profile of a step with drafts behind it."""
    admissions, tables = _sequences(batch)
    ids = range(batch)

    def rows(start: int, count: int, num_next_drafts: int) -> tuple[StepRow, ...]:
        chunk = (1,) * count
        return tuple(
            StepRow(seq, start, chunk, 0, True, num_next_drafts=num_next_drafts) for seq in ids
        )

    runner.execute(StepInput(0, (), admissions, tables, rows(0, _CONTEXT, 1)))
    seconds = []
    for count in (0, _NUM_DRAFTS):
        step = StepInput(1, (), (), (), rows(_CONTEXT, 1, count))
        seconds.append(median_s(partial(runner.execute, step), context.device, _ROUNDS))
    kernels = profile(lambda: runner.execute(step), context.device)
    runner.execute(StepInput(2, tuple(ids), (), (), ()))
    return (seconds[1] - seconds[0]) / _NUM_DRAFTS * 1e3, kernels


def _sequences(
    batch: int,
) -> tuple[tuple[SequenceAdmission, ...], tuple[BlockTableDelta, ...]]:
    """Return sequences with a block table each."""
    rules, ids = SamplingRules(temperature=0.0), range(batch)
    blocks = [tuple(range(seq * _NUM_BLOCKS, (seq + 1) * _NUM_BLOCKS)) for seq in ids]
    tokens = (1,) * _CONTEXT
    return (
        tuple(SequenceAdmission(seq, _CONTEXT, rules, tokens) for seq in ids),
        tuple(BlockTableDelta(seq, 0, blocks[seq]) for seq in ids),
    )
