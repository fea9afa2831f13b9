"""Report of `benchmarks.drafting`: rows, limits, and the Markdown page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.cost_table import MAX_DRAFT_TOKENS, CostTable
from benchmarks.draft_lengths import LEAST_SHARE, START, LengthRow, lengths_table
from benchmarks.machine import Machine

_SHOWN_DRAFT_TOKENS = 7
_LONE_METHODS = ("ngram", "suffix", "draft_model")


@dataclass(frozen=True)
class Row:
    """One method on one suite in one pass.

    mean_acceptance_length: tokens that a draft yields, the target's own included; steps without a
        draft do not count. tokens_per_step: over all steps, the inverse of forward passes per
        token. drafted_share: share of steps with a draft. model_share: share of steps in which the
        draft model drafts. draft_us: CPU microseconds per step in the proposer, including the
        processing of new tokens and prompts, without the draft model.
    """

    method: str
    num_draft_tokens: int
    suite: str
    pass_number: int
    mean_acceptance_length: float
    acceptance_rate: float
    tokens_per_step: float
    drafted_share: float
    model_share: float
    draft_us: float


@dataclass(frozen=True)
class Bar:
    """Figure with a lower limit."""

    name: str
    figure: float
    at_least: float
    is_met: bool


@dataclass(frozen=True)
class DraftingReport:
    """Complete results of a run."""

    machine: Machine
    model: str
    num_prompts: int
    max_tokens: int
    rows: tuple[Row, ...]
    costs: CostTable
    lengths: tuple[LengthRow, ...]
    bars: tuple[Bar, ...]


def bars(rows: Sequence[Row]) -> tuple[Bar, ...]:
    """Check prompt lookup on repetitive suites, and suffix decoding against it on repeated prompts.

    The latter are compared by tokens per step. Suffix decoding drafts in more steps, also with
    little evidence, so its mean draft is shorter while it needs fewer steps.
    """

    def value(method: str, suite: str, pass_number: int, name: str) -> float:
        return float(getattr(_find(rows, method, suite, pass_number), name))

    made = [
        _bar(
            f"ngram on {suite}, mean acceptance length",
            value("ngram", suite, 1, "mean_acceptance_length"),
            least,
        )
        for suite, least in (("edit", 2.0), ("humaneval", 1.9))
    ]
    made += [
        _bar(
            f"suffix above ngram on {suite}, second pass, tokens a step",
            value("suffix", suite, 2, "tokens_per_step"),
            value("ngram", suite, 2, "tokens_per_step"),
        )
        for suite in _suites(rows)
    ]
    return tuple(made)


def length_bars(rows: Sequence[LengthRow]) -> tuple[Bar, ...]:
    """Check that adaptive lengths are close to the best fixed length.

    Only for methods that draft alone: with a lookup first, the length also decides which one
    drafts.
    """
    return tuple(
        _bar(
            f"adaptive over the best fixed length, {row.method} on {row.suite}", share, LEAST_SHARE
        )
        for row in rows
        if row.method in _LONE_METHODS
        for share in [round(row.share, 3)]
    )


def markdown(report: DraftingReport) -> str:
    """Return the page, with one table per pass of methods by suites."""
    passes = sorted({row.pass_number for row in report.rows})
    tables = "\n\n".join(_table(report.rows, number) for number in passes)
    bar_lines = "\n".join(
        f"- {bar.name}: {bar.figure:.2f}, at least {bar.at_least:.2f}: "
        f"{'met' if bar.is_met else 'MISSED'}"
        for bar in report.bars
    )
    return f"""# Drafting

What the drafts of each method yield: {report.model}, greedy, k = {_SHOWN_DRAFT_TOKENS}, \
{report.num_prompts} prompts over all suites, up to {report.max_tokens} tokens each. Made by \
`make bench-drafting`, which also writes `drafting.json` with k = 1, 3 and 5. On \
{report.machine.cpu_model}, {report.machine.num_cores} cores, {report.machine.measured_at}.

Each cell: mean acceptance length (tokens a draft yields, the target's own included) / tokens a \
step (steps without a draft included). The draft model is the model itself in int8. In the second \
pass the same is asked in slightly other words, and `suffix` has the outputs of the first.

{tables}

Share of the steps in which the draft model drafts, and CPU time a step in the proposer (with \
indexing the prompts; the draft model's own time aside), over all suites:

{_proposer_table(report.rows)}

## Lengths

Tokens per second of one stream by the number of draft tokens, both passes together, on recorded \
costs and not on the clock of this run: each step is counted with the milliseconds in the table \
below, which the two models took for it on {report.costs.machine.cpu_model}, threads: \
{report.costs.num_threads}, {report.costs.machine.measured_at} (`--fresh-costs`). "Adaptive" \
begins with {START} tokens and follows each sequence's own acceptance, up to {MAX_DRAFT_TOKENS} \
(`adaptive_length`). Where a lookup comes first there is no bar: it spares the model whom it \
drafts the full length for, so the length decides who drafts, of which acceptance says nothing.

{lengths_table(report.lengths)}

{_step_costs(report.costs)}

Bars:

{bar_lines}
"""


def _table(rows: Sequence[Row], pass_number: int) -> str:
    suites = _suites(rows)
    lines = [f"| pass {pass_number} | {' | '.join(suites)} |", "|---|" + "---|" * len(suites)]
    for method in _methods(rows):
        found = [_find(rows, method, suite, pass_number) for suite in suites]
        cells = [
            f"{each.mean_acceptance_length:.2f} / {each.tokens_per_step:.2f}" for each in found
        ]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _proposer_table(rows: Sequence[Row]) -> str:
    lines = ["| | draft model drafts | µs a step |", "|---|---|---|"]
    for method in _methods(rows):
        found = [
            row
            for row in rows
            if row.method == method and row.num_draft_tokens == _SHOWN_DRAFT_TOKENS
        ]
        share = sum(row.model_share for row in found) / len(found)
        micros = sum(row.draft_us for row in found) / len(found)
        lines.append(f"| {method} | {share:.0%} | {micros:.0f} |")
    return "\n".join(lines)


def _step_costs(costs: CostTable) -> str:
    lines = ["| draft tokens | target, ms | draft model, ms |", "|---|---|---|"]
    for count, (verify_s, draft_s) in enumerate(zip(costs.verify_s, costs.draft_s, strict=True)):
        lines.append(f"| {count} | {1000 * verify_s:.1f} | {1000 * draft_s:.1f} |")
    return "\n".join(lines)


def _bar(name: str, figure: float, at_least: float) -> Bar:
    return Bar(name, figure, at_least, figure >= at_least)


def _find(rows: Sequence[Row], method: str, suite: str, pass_number: int) -> Row:
    wanted = (method, _SHOWN_DRAFT_TOKENS, suite, pass_number)
    return next(
        row
        for row in rows
        if (row.method, row.num_draft_tokens, row.suite, row.pass_number) == wanted
    )


def _suites(rows: Sequence[Row]) -> list[str]:
    return sorted({row.suite for row in rows})


def _methods(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.method for row in rows))
