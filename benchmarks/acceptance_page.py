"""Markdown page of the results of `benchmarks.acceptance`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.draft_support import LISTED

_VERIFIERS = ("coupled", "rejection", "block")


def page(report: Mapping[str, Any]) -> str:
    """Return the complete page for a report."""
    outcomes, supports = report["outcomes"], report["supports"]
    options, machine = report["options"], report["machine"]
    sequences = options["num_prompts"] * options["num_seeds"]
    return f"""# Acceptance of the lossless verifiers

Made by `{report["command"]}` on {machine["cpu_model"]}, torch {machine["torch"]}, in \
{report["seconds"]} s; do not edit. Target {report["target"]}; {sequences} sequences \
({options["num_prompts"]} prompts with {options["num_seeds"]} seeds each) of \
{options["max_tokens"]} tokens; {options["num_speculative_tokens"]} draft tokens a step. \
The data: [acceptance.json](acceptance.json).

Accepted per drafted token, with its standard error over the sequences, and mean tokens a step in \
brackets. Each run has texts of its own, so less than two standard errors may be chance. At \
temperature 0 the verifiers are the same one.

{_table(("draft", "temperature", *_VERIFIERS), _outcome_rows(outcomes))}

## Drafts from the most likely tokens only

For `rejection` and `block` a draft token is drawn from the n most likely tokens. Below is the \
chance that rejection sampling accepts one, the mean over {supports[0]["num_positions"]} positions \
of the sum over x of min(p(x), q(x)): computed, not sampled.

{_table(("draft", "temperature", *(f"n = {n}" for n in LISTED), "all"), _support_rows(supports))}
"""


def _outcome_rows(outcomes: Sequence[Mapping[str, Any]]) -> Iterable[list[str]]:
    cells = {
        (each["draft"], each["temperature"], each["verifier"]): _cell(each) for each in outcomes
    }
    for draft, temperature in dict.fromkeys(key[:2] for key in cells):
        found = [cells.get((draft, temperature, name), "the same") for name in _VERIFIERS]
        yield [draft, f"{temperature:g}", *found]


def _cell(outcome: Mapping[str, Any]) -> str:
    rate, error = outcome["acceptance_rate"], outcome["standard_error"]
    return f"{rate:.3f} ± {error:.3f} ({outcome['mean_acceptance_length']:.2f})"


def _support_rows(supports: Sequence[Mapping[str, Any]]) -> Iterable[list[str]]:
    for each in supports:
        shares = [f"{value:.4f}" for value in each["acceptance"]]
        yield [each["draft"], f"{each['temperature']:g}", *shares]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
