"""Measure the host's part of a step, on a device that computes nothing.

Runs the real engine, worker and packing of steps for a batch in which all sequences decode. In
place of its launches a step writes any tokens: behind drafts half of those that it may accept. So
all that remains is what a GPU waits for, unless the step is begun ahead:

    engine    decision, scheduling, drafting, commit, outputs
    begin     state of the sequences, choice of the shape, packing
    collect   results as rows

Proposals cost nothing. The last line printed is JSON, in microseconds of a step.

    python -m benchmarks.host_time [--rows 1 64 256] [--drafts 0 5] [--rounds 5] [--output FILE]
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from benchmarks.gpu.random_models import SMALL, random_decoder, write_config
from benchmarks.gpu.throughput import AnyTokens
from benchmarks.report_file import add_output, command_line, write_report
from benchmarks.synthetic_service import auto_policy
from benchmarks.tiny_model import write_tiny_llama
from specdec.config.engine import EngineConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.engine import Engine
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.sequences.sequence import EngineRequest
from specdec.speculation.policy.cost_model import CostTable
from specdec.speculation.policy.policy import SpeculationPolicy
from specdec.text.tokenizer import Tokenizer
from specdec.types.messages import StepInput, VerifyOutput
from specdec.types.sampling.sampling_params import SamplingParams
from specdec.worker import LocalTarget, TargetModelRunner
from specdec.worker.device.input.input import Word, rows_of
from specdec.worker.device.launch import StepLauncher
from specdec.worker.device.plan import StepPlan

_ROWS, _DRAFTS = (1, 64, 256), (0, 5)
_BLOCK_SIZE = 16
_PROMPT_TOKENS = 16
_WARM_STEPS, _NUM_STEPS = 3, 16


@dataclass(frozen=True)
class HostTime:
    """Microseconds of CPU time of a step: the minimum over all steps of all rounds."""

    num_rows: int
    num_drafts: int
    engine_us: float
    begin_us: float
    collect_us: float

    @property
    def total_us(self) -> float:
        """All three parts."""
        return self.engine_us + self.begin_us + self.collect_us


@dataclass(frozen=True)
class Report:
    """Complete results."""

    command: str
    times: tuple[HostTime, ...]


class InstantLauncher:
    """A launcher that computes nothing, and takes no time that depends on the model."""

    def __init__(self, launcher: StepLauncher) -> None:
        self._launcher = launcher
        self.buffers, self.runs_ragged = launcher.buffers, launcher.runs_ragged

    def holds_tree(self, num_nodes: int, depth: int) -> bool:
        """See StepLauncher."""
        return self._launcher.holds_tree(num_nodes, depth)

    def launch(self, plan: StepPlan) -> Tensor | None:
        """Write the results of a step without a head."""
        shape = plan.shape
        table = rows_of(self.buffers.input, shape)
        end = shape.num_rows * (1 + shape.query_len)
        results = self.buffers.output[:end].view(shape.num_rows, -1)
        results[:, 0] = 1 + table[:, Word.NUM_DRAFTS] // 2
        results[:, 1:] = 2
        return None


class _TimedTarget:
    """A target that sums the seconds of its calls."""

    def __init__(self, target: LocalTarget) -> None:
        self._target = target
        self.begin_s = self.collect_s = 0.0

    def begin(self, step: StepInput) -> None:
        """See Target."""
        began_at_s = time.thread_time()
        self._target.begin(step)
        self.begin_s += time.thread_time() - began_at_s

    def collect(self) -> VerifyOutput:
        """See Target."""
        began_at_s = time.thread_time()
        output = self._target.collect()
        self.collect_s += time.thread_time() - began_at_s
        return output


class HostBench:
    """Batches of one size with one number of drafts, on a worker in this process."""

    def __init__(self, directory: Path, num_rows: int, num_drafts: int) -> None:
        """directory: to write a model to."""
        write_tiny_llama(directory)
        self._num_rows, self._num_drafts = num_rows, num_drafts
        self._tokenizer = Tokenizer(directory)
        self._model: ModelConfig = write_config(directory, {**SMALL})
        self._speculation = SpeculativeConfig.of("ngram", num_drafts) if num_drafts else None
        num_steps = _WARM_STEPS + _NUM_STEPS + 2
        self._max_tokens = (1 + num_drafts // 2) * num_steps + num_drafts
        length = _PROMPT_TOKENS + self._max_tokens + num_drafts
        self._limits = EngineConfig(
            max_model_len=length,
            num_blocks=num_rows * math.ceil(length / _BLOCK_SIZE),
            block_size=_BLOCK_SIZE,
            max_num_seqs=num_rows,
            max_num_batched_tokens=max(num_rows * _PROMPT_TOKENS, 16 * num_rows),
            async_scheduling=True,
            speculation=self._speculation,
        )
        decoder = random_decoder(
            self._model, torch.device("cpu"), torch.float32, length, _BLOCK_SIZE
        )
        runner = TargetModelRunner(
            decoder,
            TensorParallelGroup(),
            num_blocks=self._limits.num_blocks,
            block_size=_BLOCK_SIZE,
            vocab_size=self._model.vocab_size,
            has_padding_block=True,
        )
        runner.use_device_steps(self._limits, None)
        steps = runner.device_steps
        assert steps is not None
        steps._launcher = InstantLauncher(steps._launcher)  # type: ignore[assignment]
        self._runner = runner

    def run(self) -> list[tuple[float, float, float]]:
        """Return the seconds of engine, begin and collect of each step."""
        target = _TimedTarget(LocalTarget(self._runner))
        proposer = AnyTokens() if self._speculation else None
        policy = self._policy() if self._speculation else None
        engine = Engine(self._limits, self._model, target, self._tokenizer, proposer, policy)
        prompt = tuple(range(2, 2 + _PROMPT_TOKENS))
        params = SamplingParams(temperature=0.0, max_tokens=self._max_tokens, ignore_eos=True)
        for index in range(self._num_rows):
            engine.add(EngineRequest(prompt, params, request_id=str(index), seed=index))
        while engine.stats().num_decoding < self._num_rows:
            engine.step()
        times = []
        for index in range(_WARM_STEPS + _NUM_STEPS):
            target.begin_s = target.collect_s = 0.0
            began_at_s = time.thread_time()
            engine.step()
            seconds = time.thread_time() - began_at_s
            assert engine.stats().num_decoding == self._num_rows, "a sequence has ended"
            if index >= _WARM_STEPS:
                own_s = seconds - target.begin_s - target.collect_s
                times.append((own_s, target.begin_s, target.collect_s))
        for index in range(self._num_rows):
            engine.abort(str(index))
        while engine.has_work:
            engine.step()
        return times

    def _policy(self) -> SpeculationPolicy:
        """Return a policy by which drafts pay."""
        table = CostTable((1,), (0, self._num_drafts), ((1e-3, 1.01e-3),))
        table = (
            table
            if self._num_rows == 1
            else CostTable((1, self._num_rows), table.draft_tokens, table.seconds * 2)
        )
        return auto_policy(time.monotonic, table, self._num_drafts)


def measure(rows: Sequence[int], drafts: Sequence[int], num_rounds: int) -> tuple[HostTime, ...]:
    """Measure all batches in turn in each round."""
    cases = list(product(rows, drafts))
    with TemporaryDirectory() as directory:
        benches = [HostBench(Path(directory), *case) for case in cases]
        times: list[list[tuple[float, float, float]]] = [[] for _ in cases]
        for _ in range(num_rounds):
            for bench, own in zip(benches, times, strict=True):
                own += bench.run()
    return tuple(
        HostTime(*case, *(1e6 * min(part) for part in zip(*own, strict=True)))
        for case, own in zip(cases, times, strict=True)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    times = measure(options.rows, options.drafts, options.rounds)
    for each in times:
        print(
            f"{each.num_rows:5} rows, {each.num_drafts} drafts: {each.total_us:7.0f} us"
            f" = engine {each.engine_us:.0f}, begin {each.begin_us:.0f},"
            f" collect {each.collect_us:.0f}"
        )
    command = command_line("benchmarks.host_time", arguments or sys.argv[1:])
    write_report(Report(command, times), options.output)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.host_time", description="Measure the host's part of a step."
    )
    parser.add_argument("--rows", type=int, nargs="+", default=_ROWS)
    parser.add_argument("--drafts", type=int, nargs="+", default=_DRAFTS)
    parser.add_argument("--rounds", type=int, default=5)
    add_output(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
