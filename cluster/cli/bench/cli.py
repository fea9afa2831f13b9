"""`specdec bench`: benchmarks of a running service."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from cluster.cli.bench.backend import Backend
from cluster.cli.bench.charts import BarChart, draw_charts, require_matplotlib
from cluster.cli.bench.dataset import Dataset, arrival_times, read_prompts
from cluster.cli.bench.load import RequestRecord, send_requests, summarize
from cluster.cli.bench.load_flags import field_flags
from cluster.cli.bench.load_options import LoadOptions
from cluster.cli.bench.load_report import Load, LoadReport, LoadRun, lines, plot
from cluster.cli.bench.methods import MethodReport, MethodResult, compare
from cluster.cli.errors import EXIT_FAILED
from cluster.cli.options import client_flags, load_client_flags, timeout_flag
from cluster.cli.output import SectionedCommand, default_flag, json_flag, progress_bar, show_result
from cluster.cli.parameter_types import EXISTING_FILE, NEW_FILE
from cluster.cli.tables import aligned, shown_number
from specdec.client import Client
from specdec.types.sampling.sampling_params import SamplingParams

_SEED = 0
_WARM_UP = -1  # index of the run that is not measured


@click.group()
def bench() -> None:
    """Benchmark a running service."""


@bench.command(short_help="Compare the loaded speculation methods.")
@click.argument("prompts_file", type=EXISTING_FILE)
@click.option(
    "--num-prompts",
    type=click.IntRange(min=1),
    help="Number of prompts to use from the file. Default: all.",
)
@default_flag(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=128,
    help="Maximum number of output tokens per request.",
)
@default_flag(
    "--temperature", type=float, default=0.0, help="Sampling temperature, from 0 (greedy) to 100."
)
@click.option("--output", type=NEW_FILE, help="Write the JSON report to this file.")
@click.option(
    "--plot",
    type=NEW_FILE,
    callback=require_matplotlib,
    help="Write a bar chart to this file, as SVG.",
)
@timeout_flag
@json_flag
@client_flags
def methods(
    prompts_file: Path,
    num_prompts: int | None,
    max_tokens: int,
    temperature: float,
    output: Path | None,
    plot: Path | None,
    as_json: bool,
    **connection: Any,
) -> None:
    """Compare the loaded speculation methods, and no speculation, on PROMPTS_FILE.

    PROMPTS_FILE is a JSON lines file: strings, or objects with "prompt" or "turns". Requests run
    one at a time.

    The suffix method caches outputs of earlier requests. If it is loaded together with others, its
    own run and the combined run share this cache; to measure it with an empty cache, restart the
    service with suffix alone.
    """
    prompts = read_prompts(prompts_file)[:num_prompts]
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=_SEED)
    with Client(**connection) as client, progress_bar(None, "request") as advance:
        report = compare(client, prompts, params, advance)
    if output is not None:
        output.write_text(json.dumps(asdict(report)) + "\n", encoding="utf-8")
    if plot is not None:
        plot.write_text(draw_charts([_chart(report)]), encoding="utf-8")
    show_result(asdict(report), _table(report), as_json)


_HEADING = (
    *("method", "tokens/s", "speed-up", "acceptance", "mean length", "drafts"),
    "other outputs",
)


def _table(report: MethodReport) -> str:
    rows = [_HEADING, *map(_cells, report.results)]
    return "\n".join(aligned(rows, numbers=range(1, len(_HEADING))))


def _cells(result: MethodResult) -> tuple[str, ...]:
    rate, length = f"{result.acceptance_rate:.0%}", f"{result.mean_acceptance_length:.2f}"
    return (
        result.name,
        shown_number(result.tokens_per_s, 1),
        shown_number(result.speedup, 2),
        *((rate, length) if result.num_drafts else ("-", "-")),
        str(result.num_drafts),
        str(result.num_other_answers),
    )


def _chart(report: MethodReport) -> BarChart:
    """Return a bar for each method: its tokens per second, with its acceptance length below."""
    title = f"{report.model}: tokens per second, median of {report.num_prompts} prompts"
    groups = {
        f"{each.name}\nacceptance length {each.mean_acceptance_length:.2f}"
        if each.num_drafts
        else each.name: {"tokens per second": each.tokens_per_s or 0.0}
        for each in report.results
    }
    return BarChart(title, groups)


@bench.command("serve", cls=SectionedCommand)
@json_flag
@load_client_flags
@field_flags(LoadOptions)
@click.pass_context
def bench_serve(ctx: click.Context, /, as_json: bool, **given: Any) -> None:
    """Benchmark the throughput and latency of a running service.

    Sends requests in a closed loop (--max-concurrency) or at a rate (--request-rate), with random
    words or the prompts of a file, over gRPC or the OpenAI API. Exit code 1 if no request
    succeeded. The metrics are defined in docs/cli.md.
    """
    options = LoadOptions(**given)
    _reject_flags_without_effect(ctx, options)
    loads, dataset = options.loads, options.dataset
    with closing(options.connect()) as backend:
        warmup = dataset.requests(options.num_warmups, _WARM_UP)
        send_requests(backend, warmup, [None] * len(warmup), 1, lambda: None)
        records = [_measure(backend, dataset, options, load, run) for run, load in enumerate(loads)]
        report = _load_report(options, backend.model, loads, records)
    text = "\n".join(lines(report, options.percentile_metrics))
    show_result(report.as_json(), text, as_json)
    if options.output is not None:
        options.output.write_text(json.dumps(report.as_json()) + "\n", encoding="utf-8")
    if options.plot is not None:
        markup = plot(report, records, options.percentile_metrics)
        options.plot.write_text(markup, encoding="utf-8")
    if not any(run.summary.completed for run in report.runs):
        ctx.exit(EXIT_FAILED)


def _reject_flags_without_effect(ctx: click.Context, options: LoadOptions) -> None:
    """Raise UsageError for a flag on the command line that has no effect beside the others."""
    flags = {param.name: param.opts[0] for param in ctx.command.params}
    for name, reason in _flags_without_effect(options):
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{flags[name]} has no effect {reason}", ctx)


def _flags_without_effect(options: LoadOptions) -> Iterator[tuple[str, str]]:
    """Yield parameter names, and the condition under which they have no effect."""
    if options.backend == "grpc":
        yield "base_url", "with --backend grpc; use --address"
        yield "model", "with --backend grpc, which measures the first served model"
    else:
        yield "address", f"with --backend {options.backend}; use --base-url"
        if not options.base_url.startswith("https:"):
            yield "tls_ca_file", "unless --base-url begins with https:"
    if options.dataset_path is None:
        yield "output_len", "without --dataset-path; use --random-output-len"
    else:
        for name in ("input_len", "output_len", "range_ratio", "prefix_len"):
            yield f"random_{name}", "with --dataset-path"
    if all(math.isinf(rate) for rate in options.request_rate or ()):
        yield "burstiness", "without a finite --request-rate"


def _measure(
    backend: Backend, dataset: Dataset, options: LoadOptions, load: Load, run: int
) -> list[RequestRecord]:
    requests = dataset.requests(options.num_prompts, run)
    due_s = _due_s(len(requests), load, options)
    with progress_bar(len(requests), "request", load.label) as advance:
        return send_requests(backend, requests, due_s, load.max_concurrency, advance)


def _due_s(count: int, load: Load, options: LoadOptions) -> Sequence[float | None]:
    if load.request_rate is None:  # all at once, or a closed loop
        return [0.0 if load.max_concurrency is None else None] * count
    return arrival_times(count, load.request_rate, options.burstiness, options.seed)


def _load_report(
    options: LoadOptions,
    model: str,
    loads: Sequence[Load],
    records: Sequence[Sequence[RequestRecord]],
) -> LoadReport:
    runs = [
        LoadRun(load, summarize(each, options.metric_percentiles, options.objectives_ms))
        for load, each in zip(loads, records, strict=True)
    ]
    return LoadReport(options.backend, model, options.parameters, runs)
