"""Times of steps by batch size, context and draft tokens, beside the memory floor."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from typing import Any

import torch

from benchmarks.gpu.parts import Context, Result, failure
from benchmarks.gpu.profiled import profile
from benchmarks.gpu.random_models import LLAMA_8B, SMALL, random_decoder, write_config
from benchmarks.gpu_steps import bandwidth, matrix_bytes, median_s
from specdec.config.engine import EngineConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.kernels.reference.state_pool import StatePool
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.hybrid import HybridDecoder
from specdec.models.llama import CausalDecoder
from specdec.types.messages import BlockTableDelta, SequenceAdmission, StepInput, StepRow
from specdec.types.sampling.sampling_spec import SamplingRules
from specdec.worker import LoadedModel, TargetModelRunner
from specdec.worker.device.step_graphs import CudaGraphs, GraphReport

BLOCK_SIZE = 16
MAX_DRAFT_TOKENS = 8
_ROUNDS = 10
_KV_SHARE = 0.7
"""Share of the memory that is free after loading the weights that the KV pool takes."""

GREEDY = SamplingRules(temperature=0.0)
SAMPLED = SamplingRules(temperature=0.8)
TRUNCATED = SamplingRules(temperature=0.8, top_p=0.95, top_k=50)


@dataclass(frozen=True)
class Sizes:
    """What a grid measures."""

    batches: Sequence[int]
    contexts: Sequence[int]
    drafts: Sequence[int]
    max_num_blocks: int


MAIN = Sizes((1, 8, 64), (1024, 4096), (0, 7), 2**20)
FULL = Sizes((1, 2, 4, 8, 16, 32, 64, 128, 256), (1024, 4096, 32768), (0, 1, 3, 5, 7, 8), 2**20)
FEW = Sizes((1, 2), (32,), (0, 3), 64)


@dataclass(frozen=True)
class Cell:
    """Median milliseconds of a step; floor_ms: of reading the weights and the KV once.

    step_ms: from its begin to its results, while nothing else runs. ahead_ms: the same of steps
    without drafts of which each is begun while the one before it runs, as an engine does; None
    where they cannot.
    """

    batch: int
    context: int
    num_drafts: int
    rules: str
    step_ms: float
    floor_ms: float
    ahead_ms: float | None = None

    @property
    def ratio(self) -> float:
        """The time as a multiple of the floor."""
        return self.step_ms / self.floor_ms


class Steps:
    """A target with random weights, and steps of any shape on it; its KV is never computed."""

    def __init__(
        self,
        decoder: CausalDecoder,
        model: ModelConfig,
        sizes: Sizes,
        *,
        has_graphs: bool,
        max_tree_nodes: int = 0,
    ) -> None:
        self.device, self._num_steps = decoder.device, 0
        wide_bytes = model.kv_bytes_per_token(_name(decoder.dtype), 1)
        self._token_bytes = wide_bytes * decoder.kv_dtype.itemsize // decoder.dtype.itemsize
        num_blocks = min(sizes.max_num_blocks, self._fitting_blocks())
        self.num_tokens = num_blocks * BLOCK_SIZE
        longest = min(max(sizes.contexts) + BLOCK_SIZE, self.num_tokens)
        limits = EngineConfig(
            max_model_len=longest,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=max(sizes.batches),
            max_num_batched_tokens=max(2048, max(sizes.batches)),
            speculation=SpeculativeConfig.of(
                "ngram",
                min(MAX_DRAFT_TOKENS, max_tree_nodes - 1) if max_tree_nodes else MAX_DRAFT_TOKENS,
                num_draft_tree_tokens=max_tree_nodes,
            ),
        )
        self.states = _states_of(decoder, limits)
        shard = (decoder, TensorParallelGroup(), model.vocab_size)
        may_capture = has_graphs and decoder.fits_graphs and self.device.type == "cuda"
        self.runner = TargetModelRunner(
            LoadedModel(*shard, has_padding_block=True, states=self.states),
            limits,
            on_device=not isinstance(decoder, HybridDecoder) or decoder.has_fixed_shapes,
            graphs=CudaGraphs(self.device) if may_capture else None,
        )
        self.weight_bytes, self.bandwidth = matrix_bytes(self.runner), bandwidth(self.device)

    @property
    def report(self) -> GraphReport:
        """The graphs that the steps have captured."""
        assert self.runner.graph_report is not None, "the host runs the steps"
        return self.runner.graph_report

    def _fitting_blocks(self) -> int:
        if self.device.type != "cuda":
            return 2**30
        gc.collect()
        torch.cuda.empty_cache()  # of a pool before this one
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        return int(free_bytes * _KV_SHARE) // (self._token_bytes * BLOCK_SIZE)

    def measure(self, batch: int, context: int, num_drafts: int, rules: SamplingRules) -> Cell:
        """Measure a step of `batch` sequences after `context` tokens each."""
        rows = self.begin(batch, context, num_drafts, rules)
        seconds = median_s(lambda: self.run_rows(rows), self.device, _ROUNDS)
        ahead_s = None if num_drafts else self._ahead_s(rows)
        self.step((), released=tuple(range(batch)))
        floor_bytes = self.weight_bytes + batch * context * self._token_bytes
        if self.states is not None:  # each is read and written
            floor_bytes += 2 * batch * self.states.memory[:, 0].nbytes
        return Cell(
            batch,
            context,
            num_drafts,
            "truncated" if rules.top_k else "sampled" if rules.temperature else "greedy",
            seconds * 1e3,
            floor_bytes / self.bandwidth * 1e3,
            None if ahead_s is None else ahead_s * 1e3,
        )

    def _ahead_s(self, rows: tuple[StepRow, ...]) -> float | None:
        """Return the median seconds between the results of steps that are begun ahead."""
        if not self.begin_ahead(rows):
            return None
        ended_at_s = []
        for _ in range(2 * _ROUNDS):
            if not self.begin_ahead(rows):
                self.runner.collect()
                return None
            self.runner.collect()
            ended_at_s.append(time.perf_counter())
        self.runner.collect()
        return statistics.median(end - begin for begin, end in pairwise(ended_at_s))

    def begin_ahead(self, rows: tuple[StepRow, ...]) -> bool:
        """Begin a step on the device, for `runner.collect`; return whether that is possible."""
        self._num_steps += 1
        return self.runner.begin(StepInput(self._num_steps, (), (), (), rows))

    def profile(self, batch: int, context: int, num_drafts: int) -> Result:
        """Profile a greedy step of that shape; host_ms: to begin it, and to wait for it."""
        rows = self.begin(batch, context, num_drafts, GREEDY)
        found = profile(lambda: self.step(rows), self.device)
        begun, collected = [], []
        for _ in range(_ROUNDS):
            began_at_s = time.perf_counter()
            is_begun = self.begin_ahead(rows)
            begun.append(time.perf_counter() - began_at_s)
            if is_begun:
                self.runner.collect()
            collected.append(time.perf_counter() - began_at_s)
        self.step((), released=tuple(range(batch)))
        begin_s, step_s = statistics.median(begun), statistics.median(collected)
        return {"begin_ms": begin_s * 1e3, "step_ms": step_s * 1e3, **found}

    def fits(self, batch: int, context: int) -> bool:
        """Return whether the pool holds the sequences."""
        return batch * (context + BLOCK_SIZE) <= self.num_tokens

    def begin(
        self, batch: int, context: int, num_drafts: int, rules: SamplingRules
    ) -> tuple[StepRow, ...]:
        """Admit sequences, and return their rows, which can be run again and again."""
        blocks = -(-(context + BLOCK_SIZE) // BLOCK_SIZE)
        ids = range(batch)
        rows = tuple(
            StepRow(seq, context, (1,) * (1 + num_drafts), num_drafts, True) for seq in ids
        )
        tables = tuple(
            BlockTableDelta(seq, 0, tuple(range(seq * blocks, (seq + 1) * blocks))) for seq in ids
        )
        admissions = tuple(SequenceAdmission(seq, context, rules, is_trial=True) for seq in ids)
        self.step(rows, admissions, tables)
        return rows

    def run_rows(self, rows: tuple[StepRow, ...]) -> None:
        """Run rows that `begin` has returned."""
        self.step(rows)

    def median_ms(self, run: Callable[[StepInput], object], rows: tuple[StepRow, ...]) -> float:
        """Return the median milliseconds of steps of these rows, each a call of `run`."""

        def step() -> None:
            self._num_steps += 1
            run(StepInput(self._num_steps, (), (), (), rows))

        return median_s(step, self.device, _ROUNDS) * 1e3

    def step(
        self,
        rows: tuple[StepRow, ...],
        admissions: tuple[SequenceAdmission, ...] = (),
        tables: tuple[BlockTableDelta, ...] = (),
        released: tuple[int, ...] = (),
    ) -> None:
        """Run a step, and wait for it."""
        self._num_steps += 1
        self.runner.execute(StepInput(self._num_steps, released, admissions, tables, rows))


def _states_of(decoder: CausalDecoder, limits: EngineConfig) -> StatePool | None:
    if not isinstance(decoder, HybridDecoder):
        return None
    return decoder.enable_states(limits.max_num_seqs, limits.max_row_guesses)


def cells_of(
    make: Callable[[], CausalDecoder], model: ModelConfig, sizes: Sizes, context: Context
) -> list[Cell]:
    """Measure greedy steps of all shapes that fit; make: a decoder, which is freed at the end."""
    steps = Steps(make(), model, sizes, has_graphs=True)
    shapes = product(sizes.batches, sizes.contexts, sizes.drafts)
    found = [steps.measure(*shape, GREEDY) for shape in shapes if steps.fits(*shape[:2])]
    del steps
    gc.collect()
    if context.is_gpu:
        torch.cuda.empty_cache()
    return found


def measure_main_steps(context: Context) -> Result:
    """Measure the steps of Llama-3.1-8B which the aims name; then profile some of them."""
    sizes = FEW if context.is_small else MAIN
    decoder, model = model_of(context)
    result = _measure_cells(decoder, model, sizes, _main_cells(sizes), context)
    profiles: Result = {}
    few = replace(sizes, batches=sizes.batches[:2], contexts=sizes.contexts[:1])
    for has_graphs in (True, False):
        steps = Steps(decoder, model, few, has_graphs=has_graphs)
        for batch, num_drafts in product(few.batches, (0, few.drafts[-1])):
            name = f"batch {batch}, {num_drafts} drafts, {'graphs' if has_graphs else 'operators'}"
            try:
                profiles[name] = steps.profile(batch, few.contexts[0], num_drafts)
            except Exception as error:  # the profiler may be missing; the other figures stay
                profiles[name] = failure(error)
            context.save(result | {"profiles": profiles})
        del steps  # and its KV pool
    return result | {"profiles": profiles}


def measure_grid(context: Context) -> Result:
    """Measure the shapes of Llama-3.1-8B over batch, context and drafts, and ways to sample."""
    sizes = FEW if context.is_small else FULL
    return _measure_cells(*model_of(context), sizes, _all_cells(sizes), context)


def model_of(context: Context) -> tuple[CausalDecoder, ModelConfig]:
    """Return a random model of the sizes of Llama-3.1-8B, and its configuration."""
    fields = SMALL if context.is_small else LLAMA_8B
    model = write_config(context.directory / "grid", fields)
    length = model.max_position_embeddings
    return random_decoder(model, context.device, torch.bfloat16, length, BLOCK_SIZE), model


Shape = tuple[int, int, int, SamplingRules]
"""Batch, context, drafts and sampling of a step."""


def _measure_cells(
    decoder: CausalDecoder,
    model: ModelConfig,
    sizes: Sizes,
    shapes: Iterable[Shape],
    context: Context,
) -> Result:
    """Measure steps, and save what was found after each."""
    steps = Steps(decoder, model, sizes, has_graphs=True)
    cells: list[dict[str, Any]] = []
    result: Result = {
        "graphs": steps.report.describe(),
        "weight_bytes": steps.weight_bytes,
        "bandwidth_bytes_per_s": steps.bandwidth,
        "cells": cells,
    }
    for batch, length, num_drafts, rules in shapes:
        if steps.fits(batch, length):
            cell = steps.measure(batch, length, num_drafts, rules)
            cells.append(asdict(cell) | {"ratio": cell.ratio})
            result["aims"] = aims(cells)
            context.save(result)
    return result


def _main_cells(sizes: Sizes) -> Iterator[Shape]:
    """Yield the steps that the aims name first, then the others of few sizes."""
    shortest, most_drafts = sizes.contexts[0], sizes.drafts[-1]
    first = [(1, shortest, 0, GREEDY), (1, shortest, most_drafts, GREEDY)]
    first += [(sizes.batches[-1], sizes.contexts[-1], 0, GREEDY)]
    first += [(1, shortest, 0, rules) for rules in (SAMPLED, TRUNCATED)]
    yield from first
    yield from (shape for shape in _all_cells(sizes) if shape not in first)


def _all_cells(sizes: Sizes) -> Iterator[Shape]:
    for context in sizes.contexts:
        for batch in sizes.batches:
            for num_drafts in sizes.drafts:
                yield batch, context, num_drafts, GREEDY
    for batch in sizes.batches:
        for rules in (SAMPLED, TRUNCATED):
            for num_drafts in (0, sizes.drafts[-1]):
                yield batch, sizes.contexts[0], num_drafts, rules


def aims(cells: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the aims that the cells decide: value and limit."""
    found = {
        (each["batch"], each["context"], each["num_drafts"], each["rules"]): each for each in cells
    }
    one, eight = found.get((1, 1024, 0, "greedy")), found.get((1, 1024, 7, "greedy"))
    many, sampled = found.get((64, 4096, 0, "greedy")), found.get((1, 1024, 0, "sampled"))
    result = {}
    if one:
        one_ms = one["ahead_ms"] or one["step_ms"]
        result["batch 1, times the floor"] = {"value": one_ms / one["floor_ms"], "at_most": 1.3}
    if one and eight:
        ratio = eight["step_ms"] / one["step_ms"]
        result["eight rows, times a step"] = {"value": ratio, "at_most": 1.15}
    if many:
        result["batch 64 at 4k, times the floor"] = {"value": many["ratio"], "at_most": 1 / 0.7}
    if one and sampled:
        ratio = sampled["step_ms"] / one["step_ms"]
        result["sampled, times greedy"] = {"value": ratio, "at_most": 1.1}
    return result


def _name(dtype: torch.dtype) -> Any:
    return str(dtype).removeprefix("torch.")
