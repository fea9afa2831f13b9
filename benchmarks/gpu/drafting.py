"""Cost of a draft token beside a step of 8B: of a 1B draft model, EAGLE-3, DSpark, Medusa heads.

Weights are random, so nothing is accepted; the time of a draft does not depend on that.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

import torch

from benchmarks.gpu.parts import Context, Result
from benchmarks.gpu.profiled import profile
from benchmarks.gpu.random_models import LLAMA_1B, LLAMA_8B, SMALL, random_decoder, write_config
from benchmarks.gpu_steps import median_s
from benchmarks.random_heads import HEADS
from specdec.config.engine import DraftLimits, EngineConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.config import HeadConfig
from specdec.models.heads.loading import load_head
from specdec.models.llama import CausalDecoder
from specdec.text.grammar.compiler import GrammarCompiler
from specdec.types.draft_messages import DraftRow, DraftStep
from specdec.types.messages import (
    BlockTableDelta,
    RowDrafting,
    SequenceAdmission,
    StepInput,
    StepRow,
    VerifyOutput,
)
from specdec.types.sampling.sampling_spec import SamplingRules
from specdec.worker import DraftModelRunner, LoadedModel, TargetModelRunner
from specdec.worker.batch.draft_grammars import DraftGrammars
from specdec.worker.device.step_graphs import CudaGraphs
from specdec.worker.target_model_runner import ServedHead

_BLOCK_SIZE, _NUM_BLOCKS, _CONTEXT, _NUM_DRAFTS, _ROUNDS = 16, 64, 256, 5, 10
_BATCHES = (1, 8)
HeadMethod = Literal["eagle3", "dspark", "medusa"]
_HEADS: tuple[HeadMethod, ...] = ("eagle3", "dspark", "medusa")
_TREES = (24, 60)
_MAX_HEAD_MS, _MAX_DRAFT_RATIO, _MAX_LEVEL_MS = 0.35, 1.3, 0.5


def measure_draft_model(context: Context) -> Result:
    """Measure a draft of five tokens by a model of the sizes of Llama-3.2-1B."""
    model = write_config(context.directory / "draft", SMALL if context.is_small else LLAMA_1B)
    decoder = _decoder(model, context)
    compiler = cast(GrammarCompiler, None)  # no sequence has a grammar
    may_capture = context.is_gpu and decoder.fits_graphs
    limits = DraftLimits(
        num_blocks=_NUM_BLOCKS * max(_BATCHES),
        block_size=_BLOCK_SIZE,
        max_model_len=_NUM_BLOCKS * _BLOCK_SIZE,
        max_catch_up_tokens=_CONTEXT,
        max_num_seqs=max(_BATCHES),
    )
    loaded = LoadedModel(decoder, TensorParallelGroup(), model.vocab_size, has_padding_block=True)
    runner = DraftModelRunner(loaded, limits, grammars=DraftGrammars(compiler))
    report = runner.use_device_steps(CudaGraphs(context.device) if may_capture else None)
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
    """Measure drafts of EAGLE-3, DSpark and Medusa heads after steps that verify drafts.

    The time of a draft token, or of a level of a tree, is a part of the difference to steps without
    a draft after them.
    """
    model = write_config(context.directory / "target", SMALL if context.is_small else LLAMA_8B)
    decoder = _decoder(model, context)
    found: Result = {}
    for method in _HEADS:
        found[method] = _measure_head(method, decoder, model, context)
        context.save({**found["eagle3"], **found})
    for num_nodes in _TREES[:1] if context.is_small else _TREES:
        of_trees = _measure_head("eagle3", decoder, model, context, num_nodes)
        found[_tree_name(num_nodes)] = of_trees
        context.save({**found["eagle3"], **found})
    limits = {"eagle3": ("draft step of an EAGLE-3 head, ms", _MAX_HEAD_MS)}
    limits[_tree_name(_TREES[0])] = (
        f"level of a tree of {_TREES[0]} of an EAGLE-3 head, ms",
        _MAX_LEVEL_MS,
    )
    aims = {
        aim: {"value": found[name]["ms_per_token"][1], "at_most": limit}
        for name, (aim, limit) in limits.items()
    }
    batches = [each for head in found.values() for each in head["batches"].values()]
    on_device = all(each["is_on_device"] for each in batches)
    others = {name: each for name, each in found.items() if name != "eagle3"}
    return {**found["eagle3"], **others, "aims": aims, "passed": on_device}


def _tree_name(num_nodes: int) -> str:
    return f"trees of {num_nodes}"


def _measure_head(
    method: HeadMethod,
    decoder: CausalDecoder,
    model: ModelConfig,
    context: Context,
    num_nodes: int = 0,
) -> Result:
    """Measure drafts of _NUM_DRAFTS tokens; num_nodes: of trees of this depth, 0 for chains."""
    directory = context.directory / method
    if not directory.exists():
        HEADS[method](directory, model)
    runner, graphs = _runner_with_head(method, directory, decoder, model, context, num_nodes)
    result: Result = {"graphs": graphs, "ms_per_token": {}, "batches": {}}
    for batch in _BATCHES[:1] if context.is_small and num_nodes else _BATCHES:
        result["batches"][batch] = of_batch = _head_steps(runner, batch, context, num_nodes)
        difference_ms = of_batch["with_drafts_ms"] - of_batch["without_drafts_ms"]
        result["ms_per_token"][batch] = difference_ms / _NUM_DRAFTS
    runner.close()
    return result


def _runner_with_head(
    method: HeadMethod,
    directory: Path,
    decoder: CausalDecoder,
    model: ModelConfig,
    context: Context,
    num_nodes: int,
) -> tuple[TargetModelRunner, str]:
    """Return a target with a head whose steps run on the device, and a report of its graphs."""
    limits = EngineConfig(
        _NUM_BLOCKS * _BLOCK_SIZE,
        _NUM_BLOCKS * max(_BATCHES),
        _BLOCK_SIZE,
        max_num_seqs=max(_BATCHES),
        speculation=SpeculativeConfig.of(
            method, _NUM_DRAFTS, model=str(directory), num_draft_tree_tokens=num_nodes
        ),
    )
    head = load_head(HeadConfig.from_directory(directory, model), decoder)
    may_capture = context.is_gpu and decoder.fits_graphs
    runner = TargetModelRunner(
        LoadedModel(decoder, TensorParallelGroup(), model.vocab_size, has_padding_block=True),
        limits,
        head=ServedHead(head, _refuse),
        on_device=True,
        graphs=CudaGraphs(context.device) if may_capture else None,
    )
    assert runner.graph_report is not None
    return runner, runner.graph_report.describe()


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


def _head_steps(runner: TargetModelRunner, batch: int, context: Context, num_nodes: int) -> Result:
    """Return milliseconds of steps with and without a draft after them, and a profile.

    Each step verifies _NUM_DRAFTS drafts, the first ones. num_nodes: as in `_measure_head`.
    is_on_device: whether the steps run there.
    """
    texts, most = _Texts(runner, batch, is_tree=num_nodes > 0), num_nodes or _NUM_DRAFTS
    found: Result = {}
    for name, count in (("without_drafts_ms", 0), ("with_drafts_ms", most)):
        for _ in range(2):  # the head computes what it lacks after steps without a draft
            texts.step(count)
        step = partial(texts.step, count)
        found[name] = median_s(step, context.device, _ROUNDS) * 1e3
    found["is_on_device"] = texts.begin(most)
    found["profile"] = profile(partial(texts.step, most), context.device)
    texts.end()
    return found


class _Texts:
    """Sequences that continue step by step, each with drafts to verify."""

    def __init__(self, runner: TargetModelRunner, batch: int, *, is_tree: bool) -> None:
        """Run the prompts. is_tree: whether the drafts after steps are trees."""
        self._depth = _NUM_DRAFTS if is_tree else 0
        admissions, tables = _sequences(batch)
        self._runner, self._ids, self._num_steps = runner, range(batch), 0
        prompts = tuple(
            StepRow(seq, 0, (1,) * _CONTEXT, 0, True, RowDrafting(num_next=1)) for seq in self._ids
        )
        self._lengths = [_CONTEXT] * batch
        runner.execute(StepInput(0, (), admissions, tables, ()))
        # One by one: a step with all prompts is too long for the device, and the head for it.
        rows = [runner.execute(StepInput(0, (), (), (), (row,))).rows[0] for row in prompts]
        self._note(VerifyOutput(0, tuple(rows)))

    def step(self, num_next_drafts: int) -> None:
        """Run a step, with a draft after it."""
        self._note(self._runner.execute(self._input(num_next_drafts)))

    def begin(self, num_next_drafts: int) -> bool:
        """Run a step if the device can; return whether it did."""
        is_begun = self._runner.begin(self._input(num_next_drafts))
        if is_begun:
            self._note(self._runner.collect())
        return is_begun

    def end(self) -> None:
        """Release the sequences."""
        self._runner.execute(StepInput(-1, tuple(self._ids), (), (), ()))

    def _input(self, num_next_drafts: int) -> StepInput:
        self._num_steps += 1
        rows = []
        for seq, length, row in zip(self._ids, self._lengths, self._last.rows, strict=True):
            drafts = (*row.next_draft_token_ids, *(1,) * _NUM_DRAFTS)[:_NUM_DRAFTS]
            tokens = (row.token_ids[-1], *drafts)
            made = StepRow(seq, length - 1, tokens, _NUM_DRAFTS, True)
            depth = self._depth if num_next_drafts else 0
            rows.append(
                made._replace(drafting=RowDrafting(num_next=num_next_drafts, next_depth=depth))
            )
        return StepInput(self._num_steps, (), (), (), tuple(rows))

    def _note(self, output: VerifyOutput) -> None:
        self._last = output
        for index, row in enumerate(output.rows):
            self._lengths[index] += len(row.token_ids)


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
