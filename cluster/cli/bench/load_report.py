"""The runs of `specdec bench serve`, for a reader and for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cluster.cli.bench.load_statistics import LatencyName, LoadSummary
from specdec.types.stats import SpeculationStats


@dataclass(frozen=True)
class Load:
    """Of one run. None where there is no limit to the requests at once, or to their rate."""

    max_concurrency: int | None
    request_rate: float | None

    @property
    def words(self) -> str:
        """For a reader."""
        most = "" if self.max_concurrency is None else f"at most {self.max_concurrency} at once"
        if self.request_rate is None:
            return most or "all at once"
        rate = f"{self.request_rate:g} requests a second"
        return f"{rate}, {most}" if most else rate


@dataclass(frozen=True)
class LoadRun:
    """A load and what came of it."""

    load: Load
    summary: LoadSummary


@dataclass(frozen=True)
class LoadReport:
    """Everything that was asked and measured. asked: how, by name."""

    backend: str
    model: str
    asked: Mapping[str, Any]
    runs: Sequence[LoadRun]

    def as_json(self) -> dict[str, Any]:
        """With vLLM's names in each run, where it has them."""
        head = {"backend": self.backend, "model": self.model, **self.asked}
        return {**head, "runs": [_run_as_json(run) for run in self.runs]}


def lines(report: LoadReport, latencies: Sequence[LatencyName]) -> Iterator[str]:
    """What a reader is shown: a block for each run."""
    for index, run in enumerate(report.runs):
        if index:
            yield ""
        yield f"{report.model}, {report.backend}, {run.load.words}"
        yield from _counts(run.summary)
        yield from _latencies(run.summary, latencies)
        if run.summary.speculation is not None:
            yield f"{'drafts':<10}{_drafts(run.summary.speculation)}"


def _counts(summary: LoadSummary) -> Iterator[str]:
    failed = f", {summary.failed} failed" if summary.failed else ""
    yield (
        f"{'requests':<10}{summary.completed} in {summary.duration_s:.2f} s{failed}, "
        f"{summary.request_throughput:.2f} a second, at most {summary.peak_concurrency} open"
    )
    if summary.errors:
        told = ", ".join(f"{count} {kind}" for kind, count in sorted(summary.errors.items()))
        yield f"{'errors':<10}{told}"
    if summary.request_goodput is not None:
        yield f"{'goodput':<10}{summary.request_goodput:.2f} requests a second"
    yield (
        f"{'tokens':<10}{summary.total_input_tokens} in, {summary.total_output_tokens} out, "
        f"{summary.output_throughput:.1f} out a second"
    )
    if summary.max_lateness_s >= 1:
        yield f"{'late':<10}up to {summary.max_lateness_s:.1f} s after requests were due"


def _latencies(summary: LoadSummary, latencies: Sequence[LatencyName]) -> Iterator[str]:
    shown = {name: summary.latencies_ms[name] for name in latencies if name in summary.latencies_ms}
    if not shown:
        return
    percents = next(iter(shown.values())).percentiles
    columns = ["mean", "median", *(f"p{percent:g}" for percent in percents)]
    yield f"{'ms':<10}" + "".join(f"{column:>10}" for column in columns)
    for name, each in shown.items():
        values = [each.mean, each.median, *each.percentiles.values()]
        yield f"{name:<10}" + "".join(f"{value:>10.1f}" for value in values)


def _drafts(speculation: SpeculationStats) -> str:
    if not speculation.num_drafts:
        return "none"
    return (
        f"{speculation.num_drafts}, acceptance rate {speculation.acceptance_rate:.0%}, "
        f"mean acceptance length {speculation.mean_acceptance_length:.2f}"
    )


def _run_as_json(run: LoadRun) -> dict[str, Any]:
    told = asdict(run.summary)
    latencies, speculation = told.pop("latencies_ms"), run.summary.speculation
    del told["speculation"]
    told["duration"] = told.pop("duration_s")
    told["errors"] = dict(run.summary.errors)
    for name, each in latencies.items():
        for statistic in ("mean", "median", "std"):
            told[f"{statistic}_{name}_ms"] = each[statistic]
        for percent, value in each["percentiles"].items():
            told[f"p{percent:g}_{name}_ms"] = value
    if speculation is not None:
        told["spec_decode_num_drafts"] = speculation.num_drafts
        told["spec_decode_draft_tokens"] = speculation.num_draft_tokens
        told["spec_decode_accepted_tokens"] = speculation.num_accepted_tokens
        told["spec_decode_acceptance_rate"] = speculation.acceptance_rate
        told["spec_decode_acceptance_length"] = speculation.mean_acceptance_length
    return {**asdict(run.load), **told}
