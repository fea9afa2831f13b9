"""Report of `benchmarks.peers`: JSON, a chart, and a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.machine import Machine
from benchmarks.peers.comparisons import MANY, OURS, many_case, plain_case
from benchmarks.rounds import Measured
from benchmarks.summary import Ratio, Row
from cluster.cli.charts import BarChart, bar_charts

_REFERENCE = "ours fp32"


@dataclass(frozen=True)
class PeerStatus:
    """Peer that took part, or the reason why not. missing: empty if it took part."""

    name: str
    precision: str
    versions: Mapping[str, str]
    load_s: float
    missing: str = ""


@dataclass(frozen=True)
class Agreement:
    """Comparison of a case's greedy tokens with those of ours in fp32.

    num_equal_tokens: tokens before the first difference, summed over the outputs.
    """

    name: str
    num_outputs: int
    num_equal: int
    num_equal_tokens: int
    num_tokens: int


@dataclass(frozen=True)
class PeersReport:
    """Complete results of a run."""

    command: str
    machine: Machine
    model: str
    num_rounds: int
    max_tokens: int
    peers: tuple[PeerStatus, ...]
    rows: tuple[Row, ...]
    ratios: tuple[Ratio, ...]
    agreements: tuple[Agreement, ...]


def agreements(measured: Measured, suites: Sequence[str]) -> tuple[Agreement, ...]:
    """Compare each one-stream case with ours in fp32 without speculation, in the same rounds."""
    found = []
    for name in measured:
        suite = name.rpartition(", ")[2]
        if suite in suites and name != plain_case(_REFERENCE, suite):
            found.append(agreement(measured, name, plain_case(_REFERENCE, suite)))
    return tuple(found)


def agreement(measured: Measured, of: str, reference: str) -> Agreement:
    """Compare one case with another, stream by stream."""
    pairs = [
        (stream.token_ids, expected.token_ids)
        for one, other in zip(measured[of], measured[reference], strict=True)
        for stream, expected in zip(one.streams, other.streams, strict=True)
    ]
    return Agreement(
        name=of,
        num_outputs=len(pairs),
        num_equal=sum(one == other for one, other in pairs),
        num_equal_tokens=sum(num_common(one, other) for one, other in pairs),
        num_tokens=sum(len(other) for _, other in pairs),
    )


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def chart(report: PeersReport, suites: Sequence[str]) -> str:
    """Return bar charts of one stream's tokens per second by suite, without and with lookups."""
    contenders = {*OURS, *(peer.name for peer in report.peers)}
    charts = []
    for is_plain, title in ((True, "without speculation"), (False, "with lookups")):
        groups: dict[str, dict[str, float]] = {}
        for row in report.rows:
            name, _, suite = row.name.rpartition(", ")
            if suite in suites and (name in contenders) == is_plain:
                groups.setdefault(suite, {})[name] = row.tokens_per_s
        if groups:
            title = f"{report.model}: tokens per second of one stream, {title}"
            charts.append(BarChart(title, groups))
    return bar_charts(charts)


def markdown(report: PeersReport, suites: Sequence[str], settings: str) -> str:
    """Return the page. settings: description of how each peer is run."""
    machine = report.machine
    return f"""# Peers

Other engines on the same model ({report.model}), prompts and numbers of tokens, greedy: \
{report.num_rounds} rounds of up to {report.max_tokens} tokens a stream, each round another prompt \
of each suite. Everything is loaded and warm, one process each, and takes turns; a figure is the \
median of the rounds, a ratio is made within each round. On {machine.cpu_model}, \
{machine.num_cores} cores, {machine.measured_at}:

    {report.command}

Tokens per second of one stream by suite, and of {MANY} streams together (slowest to fastest round):

{_table(report, suites)}

![tokens per second](peers.svg)

## Ratios

{_ratios(report.ratios)}

## Tokens

Outputs with the tokens that ours has in fp32 without speculation, and how many tokens come before \
the first difference. In fp32 only ties may differ; quantized and bf16 models say what they say.

{_agreements(report.agreements)}

## Who took part

{_statuses(report.peers)}

{settings}
"""


def _table(report: PeersReport, suites: Sequence[str]) -> str:
    rows = {row.name: row for row in report.rows}
    names = dict.fromkeys(name.rpartition(", ")[0] for name in rows)
    lines = [
        f"| | {' | '.join(suites)} | {MANY} streams |",
        "|---|" + "---|" * (len(suites) + 1),
    ]
    for name in names:
        cells = [*(plain_case(name, suite) for suite in suites), many_case(name)]
        lines.append(f"| {name} | {' | '.join(_cell(rows.get(each)) for each in cells)} |")
    return "\n".join(lines)


def _cell(row: Row | None) -> str:
    return "" if row is None else f"{row.tokens_per_s:.1f} ({row.slowest:.1f} to {row.fastest:.1f})"


def _ratios(ratios: Sequence[Ratio]) -> str:
    lines = ["| | ratio | rounds | at least | |", "|---|---|---|---|---|"]
    for each in ratios:
        aim = "" if each.aim is None else f"{each.aim:g}"
        met = {None: "", True: "met", False: "MISSED"}[each.is_met]
        spread = f"{each.smallest:.2f} to {each.largest:.2f}"
        lines.append(f"| {each.name} | {each.median:.2f} | {spread} | {aim} | {met} |")
    return "\n".join(lines)


def _agreements(found: Sequence[Agreement]) -> str:
    lines = ["| | equal outputs | tokens before a difference |", "|---|---|---|"]
    for each in found:
        tokens = f"{each.num_equal_tokens} of {each.num_tokens}"
        lines.append(f"| {each.name} | {each.num_equal} of {each.num_outputs} | {tokens} |")
    return "\n".join(lines)


def _statuses(peers: Sequence[PeerStatus]) -> str:
    lines = ["| peer | versions | loads in | |", "|---|---|---|---|"]
    for each in peers:
        versions = ", ".join(f"{name} {version}" for name, version in each.versions.items())
        reason = f"missing: {each.missing}" if each.missing else ""
        lines.append(f"| {each.name} | {versions} | {each.load_s:.0f} s | {reason} |")
    return "\n".join(lines)
