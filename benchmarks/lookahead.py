"""Compare lookahead decoding with n-gram lookup and with no speculation.

Lookahead decoding needs the target, so it cannot be replayed on recordings as in
`benchmarks.drafting`. The real engine generates, one request at a time, and each prompt runs with
all configurations before the next prompt, so a slow minute of the machine affects all of them.

    python -m benchmarks.lookahead [--num-prompts 4] [--output docs/benchmarks/lookahead.json]

Prints a table, and one line of JSON at the end.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from benchmarks.machine import describe_machine
from benchmarks.prompts import BenchmarkPrompt, add_prompts_option, load_prompts
from benchmarks.report_file import add_output, command_line, write_report
from benchmarks.workloads import MODEL
from specdec.config.engine import EngineConfig
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.engine.engine import Engine
from specdec.kernels.tensor_parallel import TensorParallelGroup
from specdec.models.config.model_config import ModelConfig
from specdec.models.resolve import resolve
from specdec.sequences.sequence import EngineRequest
from specdec.text.tokenizer import Tokenizer
from specdec.types.reports.stats import Counts
from specdec.types.sampling.sampling_params import SamplingParams
from specdec.worker import LocalTarget, TargetModelRunner, load_runner

_MAX_LEN = 2048
"""Maximum tokens of prompt and output."""

_WAYS: Mapping[str, SpeculativeConfig | None] = {
    "off": None,
    "ngram, as short": SpeculativeConfig.of("ngram", prompt_lookup_min=1, prompt_lookup_max=3),
    "lookahead, window 3": SpeculativeConfig.of("lookahead", lookahead_window_size=3),
    "lookahead, window 7": SpeculativeConfig.of("lookahead", lookahead_window_size=7),
    "lookahead, window 15": SpeculativeConfig.of("lookahead", lookahead_window_size=15),
}


@dataclass(frozen=True)
class Row:
    """One configuration, on the prompts of one suite or of all.

    tokens_per_step: 1 without speculation.
    relative_speed: tokens per second over those of `off`.
    """

    way: str
    suite: str
    tokens_per_step: float
    acceptance_rate: float
    mean_acceptance_length: float
    tokens_per_s: float
    relative_speed: float


@dataclass
class _Tally:
    """Counters of one configuration. num_steps: decode steps only."""

    num_tokens: int = 0
    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    seconds: float = 0.0

    def row(self, way: str, suite: str, plain: _Tally) -> Row:
        speed, plain_speed = (each.num_tokens / each.seconds for each in (self, plain))
        return Row(
            way=way,
            suite=suite,
            tokens_per_step=round(self.num_tokens / self.num_steps, 3),
            acceptance_rate=round(self.num_accepted_tokens / max(1, self.num_draft_tokens), 3),
            mean_acceptance_length=round(1 + self.num_accepted_tokens / max(1, self.num_drafts), 3),
            tokens_per_s=round(speed, 1),
            relative_speed=round(speed / plain_speed, 3),
        )


class _Bench:
    """One model, with an engine per configuration."""

    def __init__(self, options: argparse.Namespace) -> None:
        directory = resolve(MODEL)
        model, tokenizer = ModelConfig.from_directory(directory), Tokenizer(directory)
        config = EngineConfig(_MAX_LEN, _MAX_LEN // 16, max_num_seqs=1, enable_prefix_caching=False)
        first = load_runner(directory, "float32", config, TensorParallelGroup())
        self._params = SamplingParams(
            temperature=options.temperature, max_tokens=options.max_tokens, ignore_eos=True
        )
        self._engines = {
            way: Engine(
                replace(config, speculation=_speculation(way, options)),
                model,
                _new_target(first),
                tokenizer,
            )
            for way in _WAYS
        }
        self.prompts = load_prompts(options.prompts, tokenizer)[: options.num_prompts]

    def run(self, way: str, prompt: BenchmarkPrompt, tally: _Tally) -> list[int]:
        """Generate once; the timer starts at the first token."""
        engine = self._engines[way]
        engine.add(EngineRequest(prompt.token_ids, self._params, request_id="r", seed=0))
        token_ids: list[int] = []
        while not token_ids:
            token_ids = [token for output in engine.step() for token in output.token_ids]
        num_before, before, started_at = len(token_ids), engine.stats().counts, time.perf_counter()
        while engine.has_work:
            token_ids += [token for output in engine.step() for token in output.token_ids]
        tally.seconds += time.perf_counter() - started_at
        _count(tally, before, engine.stats().counts, len(token_ids) - num_before)
        return token_ids


def _new_target(runner: TargetModelRunner) -> LocalTarget:
    """Return a target with the same model, and its own KV and sequences."""
    return LocalTarget(
        TargetModelRunner(
            runner.model,
            runner.group,
            num_blocks=_MAX_LEN // runner.block_size,
            block_size=runner.block_size,
            vocab_size=runner.vocab_size,
        )
    )


def _speculation(way: str, options: argparse.Namespace) -> SpeculativeConfig | None:
    chosen = _WAYS[way]
    return chosen and replace(chosen, num_speculative_tokens=options.num_draft_tokens)


def _count(tally: _Tally, before: Counts, after: Counts, num_tokens: int) -> None:
    """Add the counters since `before`, whose step in flight is a decode step."""
    tally.num_tokens += num_tokens
    tally.num_steps += after.num_steps - before.num_steps + 1
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        added = getattr(after.speculation, name) - getattr(before.speculation, name)
        setattr(tally, name, getattr(tally, name) + added)


def measure(options: argparse.Namespace) -> tuple[list[Row], int]:
    """Return the rows, and the number of prompts whose tokens differ from `off` (ties, in fp32)."""
    bench, num_different = _Bench(options), 0
    tallies: dict[tuple[str, str], _Tally] = defaultdict(_Tally)
    for number, prompt in enumerate(bench.prompts):
        outputs = {}
        for way in _WAYS:
            one = _Tally()
            outputs[way] = bench.run(way, prompt, one)
            for suite in (prompt.suite, "all"):
                _add(tallies[way, suite], one)
        num_different += any(tokens != outputs["off"] for tokens in outputs.values())
        print(f"{number + 1} of {len(bench.prompts)}", file=sys.stderr)
    return [
        tally.row(way, suite, tallies["off", suite]) for (way, suite), tally in tallies.items()
    ], num_different


def _add(total: _Tally, one: _Tally) -> None:
    for name, value in vars(one).items():
        setattr(total, name, getattr(total, name) + value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return exit status 0."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser().parse_args(given)
    rows, num_different = measure(options)
    for row in rows:
        print(
            f"{row.suite:10} {row.way:22} {row.tokens_per_step:6.2f} tokens per step"
            f" {row.acceptance_rate:6.1%} accepted {row.tokens_per_s:6.1f} tokens/s"
            f" {row.relative_speed:5.2f} x"
        )
    report = {
        "machine": asdict(describe_machine()),
        "model": MODEL,
        "command": command_line("benchmarks.lookahead", given),
        "num_prompts_with_other_tokens": num_different,
        "rows": [asdict(row) for row in rows],
    }
    write_report(report, options.output)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.lookahead", description="Compare lookahead decoding with n-gram lookup."
    )
    add_prompts_option(parser)
    parser.add_argument("--num-prompts", type=int, default=8, help="number of prompts to use")
    parser.add_argument("--num-draft-tokens", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    add_output(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
