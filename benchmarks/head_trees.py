"""Measure a draft head whose drafts are chains or trees: tokens per step and per second.

One stream of SmolLM2 in this process, at temperature 0 and 0.8. Without drafts, and with each shape
of drafts, a separate engine answers the same prompts. The engines share the weights and take turns,
with another prompt in each round. A prompt has the same seed for all, so that all have the same
answer; those that differ are counted. Prefill does not count.

A tree NODES:DEPTH has that many draft tokens. It is compared with the chain of DEPTH tokens in
tokens per step, and with the fastest chain in tokens per second. The last line printed is JSON.

    python -m benchmarks.head_trees --head DIR [--trees 8:4 16:4] [--chains 2 3]
        [--quantization int8] [--rounds 12] [--cpu-time] [--output FILE]

Use --cpu-time with one thread on a shared machine to measure CPU time instead of wall time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.contenders import run_requests
from benchmarks.cpu_time import add_cpu_time, require_one_thread
from benchmarks.machine import Machine, describe_machine, num_usable_cores
from benchmarks.prompts import add_prompts_option, load_prompts
from benchmarks.report_file import add_output, command_line, write_report
from benchmarks.rounds import Case, Measured, add_round_options, measure_rounds, warm_up
from benchmarks.summary import Bar, at_least, num_other_outputs, print_bars
from benchmarks.workloads import MODEL, NO_METHOD, Contender, Measurement, Workload, one_by_one
from specdec.config.engine import EngineConfig
from specdec.config.quantization import CPU_QUANTIZATION_METHODS, QuantizationMethod
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.engine import Engine
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.heads.config import HeadConfig
from specdec.models.heads.loading import load_head
from specdec.models.resolve import print_progress, resolve
from specdec.sequences.sequence import EngineRequest
from specdec.text.tokenizer import Tokenizer
from specdec.types.drafts.draft_decision import DraftShape, chain, tree
from specdec.types.drafts.draft_tree import MAX_TREE_NODES
from specdec.types.sampling.sampling_params import MAX_NUM_SPECULATIVE_TOKENS, SamplingParams
from specdec.worker import LocalTarget, TargetModelRunner, load_runner

TEMPERATURES = (0.0, 0.8)

_BLOCK_SIZE, _NUM_BLOCKS = 16, 64


@dataclass(frozen=True)
class ShapeRow:
    """One shape of drafts at one temperature.

    tokens_per_step: mean over all steps, the target's own token included. tokens_per_s, speedup:
    medians over the rounds, the latter of the ratio to no drafts. num_other_answers: that differ
    from those without drafts.
    """

    shape: str
    temperature: float
    tokens_per_step: float
    tokens_per_s: float
    speedup: float
    num_other_answers: int


@dataclass(frozen=True)
class TreeGain:
    """A tree over chains at one temperature.

    tokens_per_step: its own over those of the chain of its depth. fastest_chain: of this
    temperature. tokens_per_s: median over the rounds of the ratio to that chain.
    """

    tree: str
    temperature: float
    tokens_per_step: float
    fastest_chain: str
    tokens_per_s: float


@dataclass(frozen=True)
class HeadTreesReport:
    """Complete results. method: of the head. is_cpu_time: whether seconds are of CPU time."""

    command: str
    machine: Machine
    model: str
    method: str
    quantization: str | None
    num_threads: int
    is_cpu_time: bool
    num_rounds: int
    max_tokens: int
    rows: tuple[ShapeRow, ...]
    gains: tuple[TreeGain, ...]
    bars: tuple[Bar, ...]


def shape_name(shape: DraftShape) -> str:
    """Return the name of a shape; NO_METHOD without drafts."""
    if shape.is_tree:
        return f"tree of {shape.num_draft_tokens}, depth {shape.depth}"
    return f"chain of {shape.depth}" if shape.depth else NO_METHOD


def case_name(shape: DraftShape, temperature: float) -> str:
    """Return the name of a case."""
    return f"{shape_name(shape)}, temperature {temperature:g}"


def shapes_of(trees: Sequence[DraftShape], lengths: Sequence[int]) -> tuple[DraftShape, ...]:
    """Return all shapes: no drafts, chains of `lengths` and of the depths of trees, and trees."""
    all_lengths = sorted({0, *lengths, *(each.depth for each in trees)})
    return (*map(chain, all_lengths), *trees)


class ShapedEngines:
    """An engine for each shape of drafts; all share one copy of target and head."""

    def __init__(
        self, directory: Path, head: Path, quantization: QuantizationMethod | None = None
    ) -> None:
        """Load the models. quantization: of both."""
        self._directory, self._head_directory = directory, head
        self._model, self.tokenizer = ModelConfig.from_directory(directory), Tokenizer(directory)
        self.max_model_len = min(self._model.max_position_embeddings, _NUM_BLOCKS * _BLOCK_SIZE)
        group = TensorParallelGroup()
        self._runner = load_runner(directory, "float32", self._config(), group, quantization)
        files = HeadConfig.from_directory(head, self._model)
        self.method = files.method
        self._head = load_head(files, self._runner.model, quantization)

    def engine(self, shape: DraftShape) -> Engine:
        """Return a new engine with drafts of a shape, which is in force in every step."""
        config = self._config(self._speculation(shape) if shape.depth else None)
        runner = TargetModelRunner(
            self._runner.model,
            self._runner.group,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            vocab_size=self._runner.vocab_size,
        )
        if shape.depth:
            runner.use_head(self._head, config, lambda _: self._head)
        return Engine(config, self._model, LocalTarget(runner), self.tokenizer)

    def _speculation(self, shape: DraftShape) -> SpeculativeConfig:
        return SpeculativeConfig.of(
            self.method,
            shape.depth,
            model=str(self._head_directory),
            num_draft_tree_tokens=shape.num_draft_tokens if shape.is_tree else 0,
        )

    def _config(self, speculation: SpeculativeConfig | None = None) -> EngineConfig:
        return EngineConfig(
            max_model_len=self.max_model_len,
            num_blocks=_NUM_BLOCKS,
            block_size=_BLOCK_SIZE,
            max_num_seqs=1,
            enable_prefix_caching=False,
            speculation=speculation,
        )


class SampledStream:
    """Engine whose requests have a temperature, a contender."""

    def __init__(self, engine: Engine, temperature: float, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._temperature = temperature
        self._clock = clock

    def measure(self, workload: Workload) -> Measurement:
        """Run a workload; the seed of each prompt follows from its tokens."""
        params = SamplingParams(
            temperature=self._temperature, max_tokens=workload.max_tokens, ignore_eos=True
        )
        requests = [
            EngineRequest(prompt, params, request_id=str(index), seed=sum(prompt))
            for index, prompt in enumerate(workload.prompts)
        ]
        return run_requests(self._engine, requests, workload.num_open, self._clock)


def summarize(measured: Measured, shapes: Sequence[DraftShape]) -> tuple[ShapeRow, ...]:
    """Return one row per temperature and shape."""
    return tuple(_row(measured, shape, each) for each in TEMPERATURES for shape in shapes)


def _row(measured: Measured, shape: DraftShape, temperature: float) -> ShapeRow:
    name, without = case_name(shape, temperature), case_name(chain(0), temperature)
    decoded = [each.decoding for each in measured[name]]
    return ShapeRow(
        shape_name(shape),
        temperature,
        sum(each.num_tokens for each in decoded) / sum(each.num_messages for each in decoded),
        statistics.median(each.tokens_per_s for each in decoded),
        _rate_ratio(measured, name, without),
        num_other_outputs(measured, name, without),
    )


def _rate_ratio(measured: Measured, above: str, below: str) -> float:
    """Return the median over the rounds of the ratio of two cases' tokens per second."""
    pairs = zip(measured[above], measured[below], strict=True)
    return statistics.median(a.decoding.tokens_per_s / b.decoding.tokens_per_s for a, b in pairs)


def gains_of(measured: Measured, shapes: Sequence[DraftShape]) -> tuple[TreeGain, ...]:
    """Return one comparison with chains per temperature and tree."""
    rows = {(each.shape, each.temperature): each for each in summarize(measured, shapes)}
    chains = [each for each in shapes if each.depth and not each.is_tree]

    def gain(shape: DraftShape, temperature: float) -> TreeGain:
        def row(each: DraftShape) -> ShapeRow:
            return rows[shape_name(each), temperature]

        fastest = max(chains, key=lambda each: row(each).speedup)
        return TreeGain(
            shape_name(shape),
            temperature,
            row(shape).tokens_per_step / row(chain(shape.depth)).tokens_per_step,
            shape_name(fastest),
            _rate_ratio(measured, case_name(shape, temperature), case_name(fastest, temperature)),
        )

    return tuple(gain(each, value) for value in TEMPERATURES for each in shapes if each.is_tree)


def bars(gains: Sequence[TreeGain]) -> tuple[Bar, ...]:
    """Check that each tree yields at least the tokens of its chain."""
    return tuple(
        at_least(
            f"{each.tree}, temperature {each.temperature:g}: tokens/step / chain of its depth",
            each.tokens_per_step,
            1,
        )
        for each in gains
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print tables, the bars and one line of JSON; return exit status 0: machines differ."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = _options(given)
    torch.set_num_threads(options.threads)
    shapes = shapes_of(options.trees, options.chains)
    engines = ShapedEngines(
        resolve(options.model, progress=print_progress), options.head, options.quantization
    )
    measured = measure(engines, shapes, options)
    gains = gains_of(measured, shapes)
    report = HeadTreesReport(
        command_line("benchmarks.head_trees", given),
        describe_machine(),
        options.model,
        engines.method,
        options.quantization,
        options.threads,
        options.cpu_time,
        options.rounds,
        options.max_tokens,
        summarize(measured, shapes),
        gains,
        bars(gains),
    )
    print_tables(report)
    write_report(report, options.output)
    return 0


def measure(
    engines: ShapedEngines, shapes: Sequence[DraftShape], options: argparse.Namespace
) -> Mapping[str, Sequence[Measurement]]:
    """Measure all shapes at all temperatures in rounds, each with the next prompt of the file."""
    longest = engines.max_model_len - options.max_tokens
    prompts = [
        each.token_ids
        for each in load_prompts(options.prompts, engines.tokenizer)
        if len(each.token_ids) <= longest
    ]
    workloads = one_by_one(prompts, options.max_tokens)
    clock = time.thread_time if options.cpu_time else time.perf_counter
    contenders: dict[str, Contender] = {}
    for shape in shapes:
        engine = engines.engine(shape)
        for temperature in TEMPERATURES:
            name = case_name(shape, temperature)
            contenders[name] = SampledStream(engine, temperature, clock)
    cases = [Case(name, name, workloads) for name in contenders]
    warm_up(contenders, cases)
    return measure_rounds(contenders, cases, options.rounds, options.quiet_limit_s)


def print_tables(report: HeadTreesReport) -> None:
    """Print one line per shape, one per tree, and the bars."""
    print(
        f"{'':24}{'temperature':>12}{'tokens/step':>13}{'tokens/s':>10}{'speed-up':>10}{'other':>7}"
    )
    for row in report.rows:
        print(
            f"{row.shape:24}{row.temperature:12g}{row.tokens_per_step:13.2f}"
            f"{row.tokens_per_s:10.1f}{row.speedup:10.2f}{row.num_other_answers:7}"
        )
    for each in report.gains:
        print(
            f"{each.tree}, temperature {each.temperature:g}: {each.tokens_per_s:.2f} times the "
            f"tokens/s of the {each.fastest_chain}"
        )
    print_bars(report.bars)


def _tree(text: str) -> DraftShape:
    """Return the tree NODES:DEPTH."""
    nodes, _, depth = text.partition(":")
    if not (nodes.isdecimal() and depth.isdecimal()):
        raise argparse.ArgumentTypeError(f"a tree must be NODES:DEPTH (got {text!r})")
    shape = tree(int(nodes), int(depth))
    if not shape.is_tree or not shape.depth or shape.num_draft_tokens > MAX_TREE_NODES:
        limit = f"NODES must exceed DEPTH, and be at most {MAX_TREE_NODES}"
        raise argparse.ArgumentTypeError(f"{limit} (got {text!r})")
    return shape


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.head_trees", description="Compare trees of a head with its chains."
    )
    parser.add_argument("--head", type=Path, required=True, help="directory of a trained head")
    parser.add_argument("--model", default=MODEL, help="target of the head")
    parser.add_argument(
        "--trees", nargs="+", type=_tree, default=[tree(8, 4), tree(16, 4)], metavar="NODES:DEPTH"
    )
    parser.add_argument(
        "--chains",
        nargs="+",
        type=int,
        choices=range(1, MAX_NUM_SPECULATIVE_TOKENS + 1),
        default=[2, 3],
        metavar="LENGTH",
    )
    parser.add_argument("--quantization", choices=CPU_QUANTIZATION_METHODS)
    parser.add_argument("--threads", type=int, default=num_usable_cores())
    add_cpu_time(parser)
    add_prompts_option(parser)
    add_round_options(parser, 12)
    add_output(parser)
    options = parser.parse_args(arguments)
    require_one_thread(parser, options)
    return options


if __name__ == "__main__":
    sys.exit(main())
