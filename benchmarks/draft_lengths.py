"""Comparison of fixed draft lengths with adaptive ones, based on a cost table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.cost_table import MAX_DRAFT_TOKENS, CostTable
from benchmarks.recordings import Recording
from benchmarks.replay import Replay
from benchmarks.report_file import markdown_table
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.text.tokenizer import Tokenizer

START = 7
"""Initial length of adaptive drafts."""

LEAST_SHARE = 0.95


@dataclass(frozen=True)
class LengthRow:
    """One method on one suite, over both passes.

    tokens_per_s: by the cost table, for each fixed length from 1.
    best: the fastest fixed length.
    adaptive_tokens_per_s: for a length that follows acceptance.
    """

    method: str
    suite: str
    tokens_per_s: tuple[float, ...]
    adaptive_tokens_per_s: float

    @property
    def best(self) -> int:
        """Fixed length with the highest throughput."""
        return 1 + self.tokens_per_s.index(max(self.tokens_per_s))

    @property
    def share(self) -> float:
        """Throughput of the adaptive length over that of the best fixed length."""
        return self.adaptive_tokens_per_s / max(self.tokens_per_s)


def compare_lengths(
    methods: Mapping[str, SpeculativeConfig],
    passes: Sequence[Sequence[Recording]],
    tokenizer: Tokenizer,
    costs: CostTable,
) -> list[LengthRow]:
    """Return one row per method and suite; one proposer handles all prompts of both passes."""
    recordings = [recording for each in passes for recording in each]

    def rate(config: SpeculativeConfig, suite: str) -> float:
        replay = Replay(config, config.num_speculative_tokens, tokenizer)
        tally = replay.run([each for each in recordings if each.suite == suite])
        return round(tally.num_tokens / tally.seconds(costs), 2)

    return [
        LengthRow(
            method,
            suite,
            tuple(rate(config, suite) for config in _fixed(method_config)),
            rate(_adaptive(method_config), suite),
        )
        for method, method_config in methods.items()
        for suite in sorted({recording.suite for recording in recordings})
    ]


def lengths_table(rows: Sequence[LengthRow]) -> str:
    """Return a Markdown table with one row per method and suite."""
    fixed = [f"k = {count}" for count in range(1, MAX_DRAFT_TOKENS + 1)]
    columns = ["method", "suite", *fixed, "adaptive", "adaptive / best k"]
    return markdown_table(columns, map(_cells, rows))


def _cells(row: LengthRow) -> list[str]:
    rates = [f"{rate:.1f}" for rate in row.tokens_per_s]
    rates[row.best - 1] = f"**{rates[row.best - 1]}**"
    return [row.method, row.suite, *rates, f"{row.adaptive_tokens_per_s:.1f}", f"{row.share:.0%}"]


def _fixed(config: SpeculativeConfig) -> list[SpeculativeConfig]:
    lengths = range(1, MAX_DRAFT_TOKENS + 1)
    return [replace(config, num_speculative_tokens=count) for count in lengths]


def _adaptive(config: SpeculativeConfig) -> SpeculativeConfig:
    return replace(
        config,
        num_speculative_tokens=START,
        adaptive_length=True,
        adaptive_length_max=MAX_DRAFT_TOKENS,
    )
