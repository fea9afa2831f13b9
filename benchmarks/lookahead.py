"""Measures lookahead decoding, beside lookups in the text alone and no speculation.

It needs the target to look ahead, so it cannot be replayed on recordings as `benchmarks.drafting`
does: the real engine generates, one request at a time. Each prompt is run in every way before the
next one is, so that a slow minute of the machine falls on all of them.

    python -m benchmarks.lookahead [--num-prompts 4] [--output docs/benchmarks/lookahead.json]

Prints a table, and ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.machine import describe_machine
from benchmarks.prompts import DEFAULT_PATH, BenchmarkPrompt, load_prompts
from specdec.config.engine import EngineConfig
from specdec.config.speculative import SpeculativeConfig
from specdec.distributed.group import TensorParallelGroup
from specdec.engine.engine import Engine
from specdec.models.config import ModelConfig
from specdec.models.resolve import resolve
from specdec.sequences.sequence import Request
from specdec.text.tokenizer import Tokenizer
from specdec.types.sampling_params import SamplingParams
from specdec.types.stats import EngineStats
from specdec.worker import LocalTarget, TargetModelRunner, load_runner

_MODEL = "smollm2-135m-instruct"
_MAX_LEN = 2048
"""Of prompt and output, in tokens."""

_WAYS: Mapping[str, SpeculativeConfig | None] = {
    "off": None,
    "ngram, as short": SpeculativeConfig("ngram", prompt_lookup_min=1, prompt_lookup_max=3),
    "lookahead, window 3": SpeculativeConfig("lookahead", lookahead_window_size=3),
    "lookahead, window 7": SpeculativeConfig("lookahead", lookahead_window_size=7),
    "lookahead, window 15": SpeculativeConfig("lookahead", lookahead_window_size=15),
}


@dataclass(frozen=True)
class Row:
    """One way, on the prompts of one suite or of all.

    tokens_per_step: 1 without speculation. relative_speed: tokens a second, over those of `off`.
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
    """num_steps: those that decode."""

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
    """One model, and an engine for every way to speculate."""

    def __init__(self, options: argparse.Namespace) -> None:
        directory = resolve(_MODEL)
        model, tokenizer = ModelConfig.from_directory(directory), Tokenizer(directory)
        config = EngineConfig(_MAX_LEN, _MAX_LEN // 16, max_num_seqs=1, enable_prefix_caching=False)
        first = load_runner(directory, "float32", config, TensorParallelGroup())
        self._params = SamplingParams(
            temperature=options.temperature, max_tokens=options.max_tokens, ignore_eos=True
        )
        self._engines = {
            way: Engine(
                replace(config, speculation=_of(way, options)), model, _beside(first), tokenizer
            )
            for way in _WAYS
        }
        self.prompts = load_prompts(options.prompts, tokenizer)[: options.num_prompts]

    def run(self, way: str, prompt: BenchmarkPrompt, tally: _Tally) -> list[int]:
        """Generates once; the time begins with the first token."""
        engine = self._engines[way]
        engine.add(Request("r", prompt.token_ids, self._params, seed=0))
        said: list[int] = []
        while not said:
            said = [token for output in engine.step() for token in output.token_ids]
        num_before, before, started_at = len(said), engine.stats(), time.perf_counter()
        while engine.has_work:
            said += [token for output in engine.step() for token in output.token_ids]
        tally.seconds += time.perf_counter() - started_at
        _count(tally, before, engine.stats(), len(said) - num_before)
        return said


def _beside(runner: TargetModelRunner) -> LocalTarget:
    """A target with the same model, and KV and sequences of its own."""
    return LocalTarget(
        TargetModelRunner(
            runner.model,
            runner.group,
            num_blocks=_MAX_LEN // runner.block_size,
            block_size=runner.block_size,
            vocab_size=runner.vocab_size,
        )
    )


def _of(way: str, options: argparse.Namespace) -> SpeculativeConfig | None:
    chosen = _WAYS[way]
    return chosen and replace(chosen, num_speculative_tokens=options.num_draft_tokens)


def _count(tally: _Tally, before: EngineStats, after: EngineStats, num_tokens: int) -> None:
    """The step in flight at `before` is one of those that decode."""
    tally.num_tokens += num_tokens
    tally.num_steps += after.num_steps - before.num_steps + 1
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        added = getattr(after.speculation, name) - getattr(before.speculation, name)
        setattr(tally, name, getattr(tally, name) + added)


def measure(options: argparse.Namespace) -> tuple[list[Row], int]:
    """The rows, and on how many prompts some way said other tokens than `off` (ties, in fp32)."""
    bench, num_different = _Bench(options), 0
    tallies: dict[tuple[str, str], _Tally] = defaultdict(_Tally)
    for number, prompt in enumerate(bench.prompts):
        said = {}
        for way in _WAYS:
            one = _Tally()
            said[way] = bench.run(way, prompt, one)
            for suite in (prompt.suite, "all"):
                _add(tallies[way, suite], one)
        num_different += any(tokens != said["off"] for tokens in said.values())
        print(f"{number + 1} of {len(bench.prompts)}", file=sys.stderr)
    return [
        tally.row(way, suite, tallies["off", suite]) for (way, suite), tally in tallies.items()
    ], num_different


def _add(total: _Tally, one: _Tally) -> None:
    for name, value in vars(one).items():
        setattr(total, name, getattr(total, name) + value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status, 0."""
    options = _parser().parse_args(arguments)
    rows, num_different = measure(options)
    for row in rows:
        print(
            f"{row.suite:10} {row.way:22} {row.tokens_per_step:6.2f} tokens a step"
            f" {row.acceptance_rate:6.1%} accepted {row.tokens_per_s:6.1f} tokens/s"
            f" {row.relative_speed:5.2f} x"
        )
    report = {
        "machine": asdict(describe_machine()),
        "model": _MODEL,
        "command": f"python -m benchmarks.lookahead {' '.join(arguments or sys.argv[1:])}".strip(),
        "num_prompts_with_other_tokens": num_different,
        "rows": [asdict(row) for row in rows],
    }
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.lookahead", description="Compare lookahead decoding with lookups."
    )
    parser.add_argument("--prompts", type=Path, default=DEFAULT_PATH, help="JSON lines file")
    parser.add_argument("--num-prompts", type=int, default=8, help="of them, from the first on")
    parser.add_argument("--num-draft-tokens", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--output", type=Path, help="for the JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
