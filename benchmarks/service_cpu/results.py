"""Results of a load: figures of one repetition, and their medians."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np

from benchmarks.service_cpu.cpu import PARTS, normalized
from benchmarks.service_cpu.device import DeviceUse
from benchmarks.service_cpu.load import Load, Times

RecordT = TypeVar("RecordT", "Latencies", DeviceUse)


@dataclass(frozen=True)
class Latencies:
    """Milliseconds of the requests of a load; per token None for whole answers and one token."""

    first_token_p50_ms: float
    first_token_p99_ms: float
    per_token_p50_ms: float | None
    per_token_p99_ms: float | None

    @classmethod
    def of(cls, times: Sequence[Times], load: Load) -> Latencies:
        """Summarize the requests of a load."""
        first = [1e3 * (each.first_at_s - each.sent_at_s) for each in times]
        p50, p99 = np.percentile(first, (50, 99)).tolist()
        if load.api.endswith("whole") or load.max_tokens == 1:
            return cls(p50, p99, None, None)
        spans = [1e3 * (each.last_at_s - each.first_at_s) for each in times]
        per_token = [span / (load.max_tokens - 1) for span in spans]
        return cls(p50, p99, *np.percentile(per_token, (50, 99)).tolist())


@dataclass(frozen=True)
class Repetition:
    """Figures of one run of a load.

    loop_us: CPU time of the fixed loop around it. used_us: CPU time of each part, raw.
    """

    tokens_per_s: float
    loop_us: float
    used_us: Mapping[str, float]
    latencies: Latencies
    device: DeviceUse


@dataclass(frozen=True)
class Row:
    """Medians of the repetitions of a load on a target.

    cpu_us: of each part, a token, or a request for loads of one token; raw, and normalized by the
    fixed loop. engine_tokens_per_s, over_engine: the engine in process on the same requests and the
    same device, compared within each repetition; None on an instant target.
    """

    target: str
    load: Load
    tokens_per_s: float
    engine_tokens_per_s: float | None
    over_engine: float | None
    loop_us: float
    raw_cpu_us: Mapping[str, float]
    cpu_us: Mapping[str, float]
    latencies: Latencies
    device: DeviceUse


def make_row(
    target: str, load: Load, repetitions: Sequence[Repetition], engine: Sequence[float]
) -> Row:
    """Return the medians. engine: tokens per second of the engine, by repetition, or none."""
    rates = [each.tokens_per_s for each in repetitions]
    ratios = [rate / own for rate, own in zip(rates, engine, strict=bool(engine))]
    raw = {part: [each.used_us[part] / load.num_tokens for each in repetitions] for part in PARTS}
    loops = [each.loop_us for each in repetitions]
    return Row(
        target,
        load,
        statistics.median(rates),
        statistics.median(engine) if engine else None,
        statistics.median(ratios) if ratios else None,
        statistics.median(loops),
        {part: statistics.median(values) for part, values in raw.items()},
        {part: statistics.median(map(normalized, raw[part], loops)) for part in PARTS},
        _medians([each.latencies for each in repetitions]),
        _medians([each.device for each in repetitions]),
    )


def _medians(records: Sequence[RecordT]) -> RecordT:
    """Return the record of the medians of each field, without those that are None."""
    medians: list[Any] = []
    for field in fields(records[0]):
        values = [getattr(each, field.name) for each in records]
        known = [value for value in values if value is not None]
        medians.append(statistics.median(known) if known else None)
    return type(records[0])(*medians)
