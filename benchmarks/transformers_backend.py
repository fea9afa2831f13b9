"""Measure models that transformers' modelling code runs: one stream, 16 streams, and `generate`.

The model is GPT-2 with random weights, 8 layers of 512, in float32. One stream of the engine is
compared with transformers' own `generate`, and 16 streams with one, in tokens per second of the
same round; rounds alternate. The last line printed is JSON.

    python -m benchmarks.transformers_backend [--threads 2] [--rounds 5] [--tokens 96] [--cpu-time]
        [--output FILE]

Use --cpu-time with one thread on a shared machine to measure CPU time instead of wall time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
from tokenizers import Tokenizer, models

from benchmarks.bystanders import CpuUsage
from benchmarks.cpu_time import add_cpu_time, require_one_thread
from benchmarks.machine import Machine, describe_machine
from benchmarks.report_file import add_output, command_line, write_report
from benchmarks.summary import Bar, at_least, print_bars
from specdec import LLM, SamplingParams

_PROMPT = tuple(37 * index % 8000 + 3 for index in range(64))
_NUM_STREAMS = 16


@dataclass(frozen=True)
class Round:
    """Tokens per second of one round."""

    generate: float
    one_stream: float
    many_streams: float


@dataclass(frozen=True)
class Report:
    """JSON report. others_percent: CPU usage of other processes, in percent of one core."""

    command: str
    machine: Machine
    num_threads: int
    is_cpu_time: bool
    others_percent: float
    rounds: tuple[Round, ...]
    bars: tuple[Bar, ...]


def write_model(directory: Path, num_layers: int = 8, width: int = 512) -> None:
    """Write GPT-2 with random weights and a tokenizer of whole words."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=8192,
            n_positions=1024,
            n_embd=width,
            n_layer=num_layers,
            n_head=8,
            bos_token_id=0,
            eos_token_id=1,
        )
        transformers.GPT2LMHeadModel(config).save_pretrained(directory)
    words = {f"word{index}": index for index in range(8192)}
    backend = Tokenizer(models.WordLevel(words, unk_token="word2"))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="word0", eos_token="word1"
    ).save_pretrained(directory)


class BackendBench:
    """The engine and transformers with the same model."""

    def __init__(self, directory: Path, num_tokens: int, clock: Callable[[], float]) -> None:
        self._num_tokens, self._clock = num_tokens, clock
        self._reference = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32
        ).eval()
        self._llm = LLM(str(directory), speculative_config=None, max_model_len=512, dtype="float32")

    def measure(self) -> Round:
        """Return the speeds of one round."""
        return Round(
            self._speed(1, self._generate),
            self._speed(1, lambda: self._serve(1)),
            self._speed(_NUM_STREAMS, lambda: self._serve(_NUM_STREAMS)),
        )

    def close(self) -> None:
        """Free the engine."""
        self._llm.shutdown()

    def _speed(self, num_streams: int, run: Callable[[], None]) -> float:
        start = self._clock()
        run()
        return num_streams * self._num_tokens / (self._clock() - start)

    @torch.inference_mode()
    def _generate(self) -> None:
        self._reference.generate(
            torch.tensor([_PROMPT]),
            max_new_tokens=self._num_tokens,
            min_new_tokens=self._num_tokens,
            do_sample=False,
            pad_token_id=0,
        )

    def _serve(self, num_streams: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=self._num_tokens, ignore_eos=True)
        shifted = [[(each + index) % 8000 + 3 for each in _PROMPT] for index in range(num_streams)]
        self._llm.generate(shifted, params, use_tqdm=False)


def bars(rounds: Sequence[Round]) -> tuple[Bar, ...]:
    """Return the median ratios with their limits."""
    one = statistics.median(each.one_stream / each.generate for each in rounds)
    many = statistics.median(each.many_streams / each.one_stream for each in rounds)
    return (
        at_least("one stream / generate of transformers", one, 0.9),
        at_least(f"{_NUM_STREAMS} streams / one stream", many, 3.0),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the bars and one line of JSON; return exit status 0."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = _options(given)
    torch.set_num_threads(options.threads)
    before = CpuUsage.now()
    clock = time.process_time if options.cpu_time else time.perf_counter
    with TemporaryDirectory() as root:
        write_model(Path(root))
        bench = BackendBench(Path(root), options.tokens, clock)
        bench.measure()
        rounds = tuple(bench.measure() for _ in range(options.rounds))
        bench.close()
    print_bars(bars(rounds))
    report = Report(
        command_line("benchmarks.transformers_backend", given),
        describe_machine(),
        options.threads,
        options.cpu_time,
        CpuUsage.now().others_percent_since(before),
        rounds,
        bars(rounds),
    )
    write_report(report, options.output)
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.transformers_backend",
        description="Measure models that transformers' modelling code runs.",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96, help="generated by each stream")
    add_cpu_time(parser)
    add_output(parser, "transformers_backend")
    options = parser.parse_args(arguments)
    require_one_thread(parser, options)
    return options


if __name__ == "__main__":
    sys.exit(main())
