"""Report of `benchmarks.throughput`: rows, ratios with aims, profiles, and the printed table."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass

from benchmarks.contenders import StepProfile
from benchmarks.machine import Machine
from benchmarks.rounds import Measured
from benchmarks.summary import Ratio, Row, compare_cases, print_ratios, print_rows


@dataclass(frozen=True)
class IdleCost:
    """CPU usage of the service's processes without requests, in percent of one core."""

    percent_of_core: float
    period_s: float
    others_percent: float
    aim: float = 5.0  # at most this


@dataclass(frozen=True)
class Settings:
    """Settings of a run."""

    model: str
    dtype: str
    num_rounds: int
    max_tokens: int


@dataclass(frozen=True)
class Report:
    """Complete results. transport_ms: milliseconds that the service adds to one stream's token."""

    settings: Settings
    machine: Machine
    rows: tuple[Row, ...]
    ratios: tuple[Ratio, ...]
    profiles: tuple[StepProfile, ...]
    transport_ms: float
    idle: IdleCost


COMPARISONS = (
    compare_cases("engine / transformers, 1 stream", "engine 1", "transformers 1", 1.3),
    compare_cases("service / transformers, 1 stream", "service 1", "transformers 1", 1.3),
    compare_cases("engine / transformers, 16 streams", "engine 16", "transformers 16"),
    compare_cases("service / transformers, 16 streams", "service 16", "transformers 16"),
    compare_cases("engine, 16 / 1 streams", "engine 16", "engine 1", 4.0),
    compare_cases("service, 16 / 1 streams", "service 16", "service 1", 4.0),
    compare_cases("transformers, 16 / 1 streams", "transformers 16", "transformers 1"),
    compare_cases("service / engine, 1 stream", "service 1", "engine 1", 0.9),
    compare_cases("service / engine, 16 streams", "service 16", "engine 16", 0.9),
    compare_cases(
        "ngram / off on edits, 1 stream", "engine 1, edits, ngram", "engine 1, edits, off"
    ),
    compare_cases(
        "ngram / off on edits, 16 streams", "engine 16, edits, ngram", "engine 16, edits, off"
    ),
)


def transport_ms(measured: Measured) -> float:
    """Return the milliseconds per token that one stream takes longer through the service."""
    pairs = zip(measured["service 1"], measured["engine 1"], strict=True)
    return 1000 * statistics.median(
        service.seconds / service.num_tokens - engine.seconds / engine.num_tokens
        for service, engine in pairs
    )


def print_tables(report: Report) -> None:
    """Print everything except settings and machine."""
    print_rows(report.rows)
    print_ratios(report.ratios)
    for profile in report.profiles:
        print(", ".join(f"{name} {value:.4g}" for name, value in asdict(profile).items()))
    print(f"transport {report.transport_ms:.2f} ms per token of one stream")
    print(f"idle service {report.idle.percent_of_core:.1f} % of a core (aim {report.idle.aim:g})")
