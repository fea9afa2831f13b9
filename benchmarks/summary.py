"""Medians of the rounds, and ratios compared with aims."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.rounds import Measured
from benchmarks.workloads import Measurement


@dataclass(frozen=True)
class Row:
    """Aggregate of a case. mean_acceptance_length: None if the contender does not report it."""

    name: str
    tokens_per_s: float  # median
    slowest: float
    fastest: float
    first_token_ms: float  # median
    mean_acceptance_length: float | None
    others_percent: float  # the worst round; see Measurement


@dataclass(frozen=True)
class Ratio:
    """Ratio of tokens per second of two cases: its median and range over the rounds."""

    name: str
    median: float
    smallest: float
    largest: float
    aim: float | None  # at least this
    is_met: bool | None  # None without an aim


@dataclass(frozen=True)
class Bar:
    """Figure with a limit."""

    name: str
    figure: float
    limit: float
    is_most: bool  # whether the limit is a maximum
    is_met: bool


def at_least(name: str, figure: float, limit: float) -> Bar:
    """Return a figure with a lower limit."""
    return Bar(name, figure, limit, is_most=False, is_met=figure >= limit)


def at_most(name: str, figure: float, limit: float) -> Bar:
    """Return a figure with an upper limit."""
    return Bar(name, figure, limit, is_most=True, is_met=figure <= limit)


@dataclass(frozen=True)
class Comparison:
    """Cases to compare, by name. With several cases on a side, their total time counts."""

    name: str
    above: tuple[str, ...]
    below: tuple[str, ...]
    aim: float | None = None


def compare_cases(name: str, above: str, below: str, aim: float | None = None) -> Comparison:
    """Compare one case with another."""
    return Comparison(name, (above,), (below,), aim)


def summarize(name: str, measurements: Sequence[Measurement]) -> Row:
    """Return medians and range."""
    rates = [measurement.tokens_per_s for measurement in measurements]
    lengths = [each.mean_acceptance_length for each in measurements]
    known = [length for length in lengths if length is not None]
    return Row(
        name=name,
        tokens_per_s=statistics.median(rates),
        slowest=min(rates),
        fastest=max(rates),
        first_token_ms=1000 * statistics.median(each.first_token_s for each in measurements),
        mean_acceptance_length=statistics.fmean(known) if known else None,
        others_percent=max(each.others_percent for each in measurements),
    )


def compare(comparison: Comparison, measured: Measured) -> Ratio:
    """Return the ratio of two sides that were measured in the same rounds."""
    pairs = zip(_rates(comparison.above, measured), _rates(comparison.below, measured), strict=True)
    ratios = [above / below for above, below in pairs]
    median, aim = statistics.median(ratios), comparison.aim
    is_met = None if aim is None else median >= aim
    return Ratio(comparison.name, median, min(ratios), max(ratios), aim, is_met)


def compare_all(comparisons: Sequence[Comparison], measured: Measured) -> tuple[Ratio, ...]:
    """Return the ratios of the comparisons whose cases were all measured."""
    return tuple(
        compare(each, measured)
        for each in comparisons
        if all(name in measured for name in (*each.above, *each.below))
    )


def num_other_outputs(measured: Measured, of: str, reference: str) -> int:
    """Count the streams of a case whose tokens differ from another case in the same rounds."""
    pairs = zip(measured[of], measured[reference], strict=True)
    return sum(
        stream.token_ids != expected.token_ids
        for one, other in pairs
        for stream, expected in zip(one.streams, other.streams, strict=True)
    )


def print_rows(rows: Sequence[Row]) -> None:
    """Print one line per row."""
    for row in rows:
        length = row.mean_acceptance_length
        print(
            f"{row.name:36s}{row.tokens_per_s:7.1f} tokens/s ({row.slowest:.1f} to "
            f"{row.fastest:.1f}), first token {row.first_token_ms:5.0f} ms, "
            f"acceptance length {'-' if length is None else f'{length:.2f}'}, "
            f"other processes {row.others_percent:.0f} %"
        )


def print_ratios(ratios: Sequence[Ratio]) -> None:
    """Print one line per ratio, with its aim."""
    for ratio in ratios:
        spread = f"({ratio.smallest:.2f} to {ratio.largest:.2f})"
        aim = "" if ratio.aim is None else f"  aim {ratio.aim:g}: {verdict(ratio.is_met)}"
        print(f"{ratio.name:56s}{ratio.median:6.2f} {spread}{aim}")


def print_bars(bars: Sequence[Bar]) -> None:
    """Print one line per figure, with its limit."""
    for bar in bars:
        limit = f"at {'most' if bar.is_most else 'least'} {bar.limit:g}"
        print(f"{bar.name}: {bar.figure:.3g}, {limit}: {verdict(bar.is_met)}")


def verdict(is_met: bool | None) -> str:
    """Return the word that reports whether a limit is met."""
    return "met" if is_met else "MISSED"


def _rates(names: Sequence[str], measured: Measured) -> list[float]:
    """Return the tokens per second of each round, over all of the cases."""
    rounds = zip(*(measured[name] for name in names), strict=True)
    return [
        sum(each.num_tokens for each in one) / sum(each.seconds for each in one) for one in rounds
    ]
