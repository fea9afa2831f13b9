"""What `benchmarks.throughput` reports: rows, ratios against aims, profiles, and their table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.contenders import Measurement, StepProfile
from benchmarks.machine import Machine


@dataclass(frozen=True)
class Row:
    """A case over all rounds."""

    name: str
    tokens_per_s: float  # median
    slowest: float
    fastest: float
    first_token_ms: float  # median
    mean_acceptance_length: float
    others_percent: float  # the worst round; see Measurement


@dataclass(frozen=True)
class Ratio:
    """How two cases compare: their ratio of tokens per second in each round, and its median."""

    name: str
    median: float
    smallest: float
    largest: float
    aim: float | None  # at least this
    is_met: bool | None  # None without an aim


@dataclass(frozen=True)
class IdleCost:
    """CPU of the service's processes without requests, in percent of one core."""

    percent_of_core: float
    period_s: float
    others_percent: float
    aim: float = 5.0  # at most this


@dataclass(frozen=True)
class Settings:
    """What was run."""

    model: str
    dtype: str
    num_rounds: int
    max_tokens: int


@dataclass(frozen=True)
class Report:
    """Everything that was measured. transport_ms: what the service adds to one stream's token."""

    settings: Settings
    machine: Machine
    rows: tuple[Row, ...]
    ratios: tuple[Ratio, ...]
    profiles: tuple[StepProfile, ...]
    transport_ms: float
    idle: IdleCost


@dataclass(frozen=True)
class Comparison:
    """Two cases to compare, by name."""

    name: str
    above: str
    below: str
    aim: float | None = None


COMPARISONS = (
    Comparison("engine / transformers, 1 stream", "engine 1", "transformers 1", 1.3),
    Comparison("service / transformers, 1 stream", "service 1", "transformers 1", 1.3),
    Comparison("engine / transformers, 16 streams", "engine 16", "transformers 16"),
    Comparison("service / transformers, 16 streams", "service 16", "transformers 16"),
    Comparison("engine, 16 / 1 streams", "engine 16", "engine 1", 4.0),
    Comparison("service, 16 / 1 streams", "service 16", "service 1", 4.0),
    Comparison("transformers, 16 / 1 streams", "transformers 16", "transformers 1"),
    Comparison("service / engine, 1 stream", "service 1", "engine 1", 0.9),
    Comparison("service / engine, 16 streams", "service 16", "engine 16", 0.9),
    Comparison("ngram / off on edits, 1 stream", "engine 1, edits, ngram", "engine 1, edits, off"),
    Comparison(
        "ngram / off on edits, 16 streams", "engine 16, edits, ngram", "engine 16, edits, off"
    ),
)


def summarize(name: str, measurements: Sequence[Measurement]) -> Row:
    """Medians and spread."""
    rates = [measurement.tokens_per_s for measurement in measurements]
    return Row(
        name=name,
        tokens_per_s=statistics.median(rates),
        slowest=min(rates),
        fastest=max(rates),
        first_token_ms=1000 * statistics.median(each.first_token_s for each in measurements),
        mean_acceptance_length=statistics.fmean(
            each.mean_acceptance_length for each in measurements
        ),
        others_percent=max(each.others_percent for each in measurements),
    )


def compare(comparison: Comparison, measured: Mapping[str, Sequence[Measurement]]) -> Ratio:
    """Both cases were measured in the same rounds."""
    pairs = zip(measured[comparison.above], measured[comparison.below], strict=True)
    ratios = [above.tokens_per_s / below.tokens_per_s for above, below in pairs]
    median, aim = statistics.median(ratios), comparison.aim
    is_met = None if aim is None else median >= aim
    return Ratio(comparison.name, median, min(ratios), max(ratios), aim, is_met)


def transport_ms(measured: Mapping[str, Sequence[Measurement]]) -> float:
    """What a token of one stream takes longer through the service than in process."""
    pairs = zip(measured["service 1"], measured["engine 1"], strict=True)
    return 1000 * statistics.median(
        service.seconds / service.num_tokens - engine.seconds / engine.num_tokens
        for service, engine in pairs
    )


def print_tables(report: Report) -> None:
    """Writes everything but settings and machine to standard output."""
    for row in report.rows:
        print(
            f"{row.name:26s}{row.tokens_per_s:7.1f} tokens/s ({row.slowest:.1f} to "
            f"{row.fastest:.1f}), first token {row.first_token_ms:5.0f} ms, "
            f"acceptance length {row.mean_acceptance_length:.2f}, "
            f"others {row.others_percent:.0f} %"
        )
    for ratio in report.ratios:
        print(
            f"{ratio.name:36s}{ratio.median:6.2f} ({ratio.smallest:.2f} to {ratio.largest:.2f})"
            + _verdict(ratio)
        )
    for profile in report.profiles:
        print(", ".join(f"{name} {value:.4g}" for name, value in asdict(profile).items()))
    print(f"transport {report.transport_ms:.2f} ms a token of one stream")
    print(f"idle service {report.idle.percent_of_core:.1f} % of a core (aim {report.idle.aim:g})")


def _verdict(ratio: Ratio) -> str:
    if ratio.aim is None:
        return ""
    return f"  aim {ratio.aim:g}: {'met' if ratio.is_met else 'MISSED'}"
