"""Measure how many tokens the drafts of each method yield, on the same greedy texts.

The model generates once. Then each method drafts along the recorded texts (`benchmarks.replay`)
with each number of draft tokens, which takes seconds. A second pass repeats the prompts with an
added sentence and keeps the proposer, so suffix decoding can use the outputs of the first pass.
Throughput is estimated from a table of step costs, measured with --fresh-costs or taken from the
existing drafting.json.

    python -m benchmarks.drafting [--num-prompts 32] [--fresh] [--fresh-costs]

Writes drafting.json and drafting.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from benchmarks.cost_table import CostTable, measure_costs, read_costs
from benchmarks.draft_lengths import compare_lengths
from benchmarks.drafting_report import DraftingReport, Row, bars, length_bars, markdown
from benchmarks.machine import describe_machine
from benchmarks.prompts import add_prompts_option, load_prompts
from benchmarks.recordings import Recording, load, record, save
from benchmarks.replay import Replay
from benchmarks.report_file import add_output, write_report, write_text
from benchmarks.workloads import MODEL
from specdec.config.hardware import default_cache_dir
from specdec.config.speculation.speculative import SpeculativeConfig
from specdec.models.resolve import resolve
from specdec.text.tokenizer import Tokenizer

_NUM_DRAFT_TOKENS = (1, 3, 5, 7)
_CLOSINGS = ("", "\n\nThink carefully before you answer.")
"""Text appended to the prompts of the first and of the second pass."""

_METHODS: Mapping[str, SpeculativeConfig] = {
    "ngram": SpeculativeConfig.of("ngram"),
    "suffix": SpeculativeConfig.of("suffix"),
    "suffix, no earlier outputs": SpeculativeConfig.of(
        "suffix", suffix_decoding_max_cached_requests=0
    ),
    "draft_model": SpeculativeConfig.of("draft_model"),
    "draft_model, ngram first": SpeculativeConfig.of("draft_model", first="ngram"),
    "draft_model, ngram of 4 first": SpeculativeConfig.of(
        "draft_model", first="ngram", prompt_lookup_min=4
    ),
    "draft_model, suffix first": SpeculativeConfig.of("draft_model", first="suffix"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0 if all limits are met."""
    options = _parser().parse_args(arguments)
    directory = resolve(MODEL)
    passes, tokenizer = _passes(directory, options), Tokenizer(directory)
    rows = [
        row
        for (method, config), count in product(_METHODS.items(), _NUM_DRAFT_TOKENS)
        for row in _replay(method, config, count, passes, tokenizer)
    ]
    costs = _costs(directory, options)
    lengths = compare_lengths(_METHODS, passes, tokenizer, costs)
    report = DraftingReport(
        machine=describe_machine(),
        model=MODEL,
        num_prompts=options.num_prompts,
        max_tokens=options.max_tokens,
        rows=tuple(rows),
        costs=costs,
        lengths=tuple(lengths),
        bars=(*bars(rows), *length_bars(lengths)),
    )
    write_text(options.output.with_suffix(".md"), markdown(report))
    print(markdown(report))
    write_report(report, options.output)
    return 0 if all(bar.is_met for bar in report.bars) else 1


def _costs(directory: Path, options: argparse.Namespace) -> CostTable:
    stored = None if options.fresh_costs else read_costs(options.output)
    return stored or measure_costs(directory)


def _passes(directory: Path, options: argparse.Namespace) -> list[list[Recording]]:
    """Return the recorded answers of each pass, generated once and kept in the cache."""
    name = f"{options.prompts.stem}-{options.num_prompts}x{options.max_tokens}.json"
    path = default_cache_dir() / "benchmarks" / name
    if options.fresh or not path.exists():
        tokenizer = Tokenizer(directory)
        prompts = [
            prompt
            for closing in _CLOSINGS
            for prompt in load_prompts(options.prompts, tokenizer, closing)[: options.num_prompts]
        ]
        save(record(directory, prompts, options.max_tokens), path)
    recordings = load(path)
    size = len(recordings) // len(_CLOSINGS)
    return [recordings[index * size :][:size] for index in range(len(_CLOSINGS))]


def _replay(
    method: str,
    config: SpeculativeConfig,
    num_draft_tokens: int,
    passes: Sequence[Sequence[Recording]],
    tokenizer: Tokenizer,
) -> list[Row]:
    """Return one row per suite and pass; one proposer handles all prompts of a suite."""
    rows = []
    for suite in sorted({recording.suite for recording in passes[0]}):
        replay = Replay(config, num_draft_tokens, tokenizer)
        for number, recordings in enumerate(passes, start=1):
            tally = replay.run([each for each in recordings if each.suite == suite])
            rows.append(
                Row(
                    method=method,
                    num_draft_tokens=num_draft_tokens,
                    suite=suite,
                    pass_number=number,
                    mean_acceptance_length=round(tally.speculation.mean_acceptance_length, 3),
                    acceptance_rate=round(tally.speculation.acceptance_rate, 3),
                    tokens_per_step=round(tally.tokens_per_step, 3),
                    drafted_share=round(tally.drafted_share, 3),
                    model_share=round(tally.model_share, 3),
                    draft_us=round(tally.draft_us, 1),
                )
            )
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.drafting", description="Compare the acceptance of all drafting methods."
    )
    add_prompts_option(parser)
    parser.add_argument("--num-prompts", type=int, default=32, help="number of prompts to use")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--fresh", action="store_true", help="generate the recordings again")
    parser.add_argument("--fresh-costs", action="store_true", help="measure the step costs again")
    add_output(parser, "drafting")
    return parser


if __name__ == "__main__":
    sys.exit(main())
