"""Measure a mixture of experts: costs of steps beside those of text, and its speed.

The model is Qwen 3 MoE with random weights in float32: 6 layers of 256, 16 experts of 256, 4 of
them for a token. A step reads the experts that its rows are routed to, so verification of k + 1
rows costs more than in a dense model, and depends on the text.

- *Costs*: the table that the cost profiler makes before the first request, beside steps of the same
  shapes on 64 sequences of prompts, each with the KV of its text. An observed time is the median
  over different texts, of each the best of a few rounds.
- *Speed*: one stream beside `generate` of transformers, and 16 streams, in alternating rounds.

The last line printed is JSON.

    python -m benchmarks.mixture [--threads 2] [--rounds 5] [--tokens 96] [--cpu-time]
        [--output FILE]

Use --cpu-time with one thread on a shared machine to measure CPU time instead of wall time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from benchmarks.bystanders import CpuUsage
from benchmarks.cpu_time import add_cpu_time, require_one_thread
from benchmarks.machine import Machine, describe_machine
from benchmarks.prompts import DEFAULT_PATH
from benchmarks.report_file import add_output, command_line, write_report
from benchmarks.summary import Bar, at_least, at_most, print_bars
from benchmarks.transformers_speed import Round, SpeedBench
from specdec.config.engine import EngineConfig
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.speculation.policy.cost_profiler import CostProfiler
from specdec.speculation.policy.cost_table import CostTable
from specdec.speculation.policy.sample_text import SAMPLE_TEXT
from specdec.text.tokenizer import Tokenizer
from specdec.types.messages import StepInput, StepRow
from specdec.types.trial_sequences import TrialSequences
from specdec.worker import LocalTarget, RankModel, load_target

_VOCAB_SIZE = 8192
_NUM_SEQUENCES, _CONTEXT_TOKENS, _MOST_DRAFT_TOKENS = 64, 64, 8
_BATCH_SIZES, _DRAFT_TOKENS = (1, 2, 4, 8, 16), (0, 1, 2, 4, 8)
_NUM_TEXTS, _NUM_ROUNDS = 8, 4
_PROFILE_BUDGET_S = 4.0
_MOST_DEVIATION, _LEAST_SPEEDUP = 0.10, 3.0


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step of one shape: profiled on a sample text, and observed on prompts."""

    num_sequences: int
    num_draft_tokens: int
    profiled_s: float
    observed_s: float

    @property
    def deviation(self) -> float:
        """Return by which part the profiled time differs."""
        return abs(self.profiled_s / self.observed_s - 1)


@dataclass(frozen=True)
class Report:
    """JSON report. others_percent: CPU usage of other processes, in percent of one core."""

    command: str
    machine: Machine
    num_threads: int
    is_cpu_time: bool
    others_percent: float
    costs: tuple[StepCost, ...]
    rounds: tuple[Round, ...]
    bars: tuple[Bar, ...]


def write_model(
    directory: Path, *, num_layers: int = 6, width: int = 256, num_experts: int = 16
) -> None:
    """Write the model with random weights, and a tokenizer that is trained on the prompts."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.Qwen3MoeConfig(
            vocab_size=_VOCAB_SIZE,
            hidden_size=width,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=width // 4,
            num_experts=num_experts,
            num_experts_per_tok=num_experts // 4,
            moe_intermediate_size=width,
            max_position_embeddings=1024,
            initializer_range=width**-0.5,  # keeps the size of activations, as training does
            bos_token_id=0,
            eos_token_id=1,
        )
        transformers.Qwen3MoeForCausalLM(config).save_pretrained(directory)
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_prompts(), trainer)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|begin|>", eos_token="<|end|>"
    ).save_pretrained(directory)


def _prompts() -> Iterator[str]:
    for line in DEFAULT_PATH.read_text(encoding="utf-8").splitlines():
        yield from json.loads(line)["turns"]


def texts(directory: Path, count: int, length: int) -> list[tuple[int, ...]]:
    """Return `count` different pieces of the prompts of `length` tokens."""
    tokenizer = Tokenizer(directory)
    token_ids = [token for each in _prompts() for token in tokenizer.encode(each)]
    step = (len(token_ids) - length) // count
    assert step > 0, "the prompts are too short"
    return [tuple(token_ids[index * step :][:length]) for index in range(count)]


class CostBench:
    """Steps on sequences with the KV of their text."""

    def __init__(self, directory: Path, clock: Callable[[], float]) -> None:
        self._clock = clock
        length = _CONTEXT_TOKENS + 1 + _MOST_DRAFT_TOKENS
        self._config = EngineConfig(
            max_model_len=512,
            num_blocks=_NUM_SEQUENCES * 8,
            max_num_seqs=_NUM_SEQUENCES,
            max_num_batched_tokens=1024,
        )
        self._target = LocalTarget(
            load_target(RankModel(directory, "float32", self._config), TensorParallelGroup())
        )
        self._texts = texts(directory, _NUM_SEQUENCES, length)
        self._sample_text = tuple(Tokenizer(directory).encode(SAMPLE_TEXT))

    def profile(self) -> CostTable:
        """Return the cost table of the profiler."""
        profiler = CostProfiler(
            self._config, _MOST_DRAFT_TOKENS, self._clock, text=self._sample_text
        )
        return profiler.verification(self._target, _PROFILE_BUDGET_S).steps

    def observe(self, shapes: Sequence[tuple[int, int]]) -> list[float]:
        """Return the seconds of steps of (sequences, draft tokens), in the order of the shapes."""
        contexts = [text[:_CONTEXT_TOKENS] for text in self._texts]
        block_size, num_blocks = self._config.block_size, self._config.num_blocks
        sequences = TrialSequences(contexts, len(self._texts[0]) + 1, block_size, num_blocks)
        self._run(sequences.admit())
        for seq_id, text in enumerate(contexts):
            self._run(StepInput(0, (), (), (), (StepRow(seq_id, 0, text, 0, samples=False),)))
        cases = list(product(range(_NUM_TEXTS), shapes))
        best = dict.fromkeys(cases, float("inf"))
        for _ in range(_NUM_ROUNDS):
            for case in cases:
                best[case] = min(best[case], self._seconds(self._step(*case)))
        self._run(sequences.release())
        return [
            statistics.median(best[place, shape] for place in range(_NUM_TEXTS)) for shape in shapes
        ]

    def _step(self, place: int, shape: tuple[int, int]) -> StepInput:
        """Return a step of a shape, on the sequences from one of several places on."""
        num_sequences, num_draft_tokens = shape
        first = place * _NUM_SEQUENCES // _NUM_TEXTS
        seq_ids = [each % _NUM_SEQUENCES for each in range(first, first + num_sequences)]
        rows = tuple(
            StepRow(
                seq_id,
                _CONTEXT_TOKENS,
                self._texts[seq_id][_CONTEXT_TOKENS:][: 1 + num_draft_tokens],
                num_draft_tokens,
                samples=True,
            )
            for seq_id in seq_ids
        )
        return StepInput(0, (), (), (), rows)

    def _seconds(self, step: StepInput) -> float:
        begun_at_s = self._clock()
        self._run(step)
        return self._clock() - begun_at_s

    def _run(self, step: StepInput) -> None:
        self._target.begin(step)
        self._target.collect()


def measure_costs(
    directory: Path, clock: Callable[[], float], shapes: Sequence[tuple[int, int]]
) -> tuple[StepCost, ...]:
    """Return the profiled and the observed seconds of each shape."""
    bench = CostBench(directory, clock)
    bench.observe(shapes)  # warm up
    table, observed = bench.profile(), bench.observe(shapes)
    return tuple(
        StepCost(*shape, table.step_s(*shape), seconds)
        for shape, seconds in zip(shapes, observed, strict=True)
    )


def bars(costs: Sequence[StepCost], rounds: Sequence[Round]) -> tuple[Bar, ...]:
    """Return the figures with their limits."""
    one = statistics.median(each.one_stream / each.generate for each in rounds)
    worst = max(each.deviation for each in costs)
    return (
        at_most("largest deviation of a profiled step from text", worst, _MOST_DEVIATION),
        at_least("one stream / generate of transformers", one, _LEAST_SPEEDUP),
    )


def print_costs(costs: Sequence[StepCost]) -> None:
    """Print one line per shape."""
    for each in costs:
        print(
            f"{each.num_sequences:3d} sequences, {each.num_draft_tokens} draft tokens: profiled "
            f"{1000 * each.profiled_s:.2f} ms, observed {1000 * each.observed_s:.2f} ms, "
            f"deviation {100 * each.deviation:.1f} %"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures and one line of JSON; return exit status 1 if a limit is missed."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = _options(given)
    torch.set_num_threads(options.threads)
    before = CpuUsage.now()
    clock = time.process_time if options.cpu_time else time.perf_counter
    with TemporaryDirectory() as root:
        write_model(Path(root))
        costs = measure_costs(Path(root), clock, list(product(_BATCH_SIZES, _DRAFT_TOKENS)))
        bench = SpeedBench(Path(root), options.tokens, clock)
        measured = iter(bench.measure, None)
        next(measured)  # warm up
        rounds = tuple(islice(measured, options.rounds))
        bench.close()
    print_costs(costs)
    found = bars(costs, rounds)
    print_bars(found)
    others = CpuUsage.now().others_percent_since(before)
    command = command_line("benchmarks.mixture", given)
    report = Report(
        command, describe_machine(), options.threads, options.cpu_time, others, costs, rounds, found
    )
    write_report(report, options.output)
    return 0 if all(each.is_met for each in found) else 1


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.mixture", description="Measure a mixture of experts."
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96, help="generated by each stream")
    add_cpu_time(parser)
    add_output(parser, "mixture")
    options = parser.parse_args(arguments)
    require_one_thread(parser, options)
    return options


if __name__ == "__main__":
    sys.exit(main())
