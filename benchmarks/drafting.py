"""Measures how many tokens the drafts of each method yield, on the same greedy texts.

The model generates once; then every method drafts along what it said (`benchmarks.replay`), with
every number of draft tokens, in seconds. A second pass asks nearly the same again, in other words,
with the same proposer: what suffix decoding has kept of the first one's outputs then counts. What
the drafts are worth in tokens per second goes by a table of what steps cost, which is measured with
--fresh-costs and else taken from the drafting.json that there is.

    python -m benchmarks.drafting [--num-prompts 32] [--fresh] [--fresh-costs]

Writes drafting.json and drafting.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path

from benchmarks.cost_table import CostTable, measure_costs, read_costs
from benchmarks.draft_lengths import compare_lengths
from benchmarks.drafting_report import DraftingReport, Row, bars, length_bars, markdown
from benchmarks.machine import describe_machine
from benchmarks.prompts import DEFAULT_PATH, load_prompts
from benchmarks.recordings import Recording, load, record, save
from benchmarks.replay import Replay
from specdec.config.paths import default_cache_dir
from specdec.config.speculative import SpeculativeConfig
from specdec.models.resolve import resolve
from specdec.text.tokenizer import Tokenizer

_MODEL = "smollm2-135m-instruct"
_DEFAULT_OUTPUT = Path("docs/benchmarks/drafting.json")

_NUM_DRAFT_TOKENS = (1, 3, 5, 7)
_CLOSINGS = ("", "\n\nThink carefully before you answer.")
"""Put behind the prompts of the first pass and of the second."""

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
    """Returns the exit status: 0 when every bar is met."""
    options = _parser().parse_args(arguments)
    directory = resolve(_MODEL)
    passes, tokenizer = _passes(directory, options), Tokenizer(directory)
    rows = [
        row
        for (method, config), count in product(_METHODS.items(), _NUM_DRAFT_TOKENS)
        for row in _replayed(method, config, count, passes, tokenizer)
    ]
    costs = _costs(directory, options)
    lengths = compare_lengths(_METHODS, passes, tokenizer, costs)
    report = DraftingReport(
        machine=describe_machine(),
        model=_MODEL,
        num_prompts=options.num_prompts,
        max_tokens=options.max_tokens,
        rows=tuple(rows),
        costs=costs,
        lengths=tuple(lengths),
        bars=(*bars(rows), *length_bars(lengths)),
    )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
    options.output.with_suffix(".md").write_text(markdown(report), encoding="utf-8")
    print(markdown(report))
    print(json.dumps(asdict(report)))
    return 0 if all(bar.is_met for bar in report.bars) else 1


def _costs(directory: Path, options: argparse.Namespace) -> CostTable:
    known = None if options.fresh_costs else read_costs(options.output)
    return known or measure_costs(directory)


def _passes(directory: Path, options: argparse.Namespace) -> list[list[Recording]]:
    """What the model says to the prompts of each pass; generated once, and kept in the cache."""
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


def _replayed(
    method: str,
    config: SpeculativeConfig,
    num_draft_tokens: int,
    passes: Sequence[Sequence[Recording]],
    tokenizer: Tokenizer,
) -> list[Row]:
    """Each suite by itself: one proposer for all of its prompts in all passes."""
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
        prog="benchmarks.drafting", description="Compare what the drafts of each method yield."
    )
    parser.add_argument("--prompts", type=Path, default=DEFAULT_PATH, help="JSON lines file")
    parser.add_argument("--num-prompts", type=int, default=32, help="of them, from the first on")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--fresh", action="store_true", help="generate again what was recorded")
    parser.add_argument(
        "--fresh-costs", action="store_true", help="measure again what a step costs"
    )
    parser.add_argument("--output", type=Path, default=_DEFAULT_OUTPUT, help="for the JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
