"""`specdec bench`: the command group and `specdec bench methods`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from cluster.cli.bench.load_cli import bench_serve
from cluster.cli.bench.method_plot import svg
from cluster.cli.bench.methods import MethodReport, MethodResult, compare
from cluster.cli.bench.prompts import read_prompts
from cluster.cli.connection_options import client_flags, timeout_flag
from cluster.cli.output import json_flag, progress_bar, show_json
from specdec.client import Client
from specdec.types.sampling_params import SamplingParams

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_NEW_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)
_SEED = 0


@click.group()
def bench() -> None:
    """Benchmark a running service."""


bench.add_command(bench_serve)


@bench.command(short_help="Compare the loaded speculation methods.")
@click.argument("prompts_file", type=_FILE)
@click.option(
    "--num-prompts",
    type=click.IntRange(min=1),
    help="Number of prompts to use from the file. Default: all.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="Maximum number of output tokens per request.",
)
@click.option(
    "--temperature",
    type=float,
    default=0.0,
    show_default=True,
    help="Sampling temperature, from 0 (greedy) to 100.",
)
@click.option("--output", type=_NEW_FILE, help="Write the JSON report to this file.")
@click.option("--plot", type=_NEW_FILE, help="Write a bar chart to this file, as SVG.")
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
        plot.write_text(svg(report), encoding="utf-8")
    if as_json:
        show_json(asdict(report))
    else:
        click.echo(_table(report))


def _table(report: MethodReport) -> str:
    heading = (
        f"{'method':<16}{'tokens/s':>10}{'speed-up':>10}{'acceptance':>12}{'mean length':>13}"
        f"{'drafts':>8}{'other outputs':>15}"
    )
    return "\n".join([heading, *map(_line, report.results)])


def _line(result: MethodResult) -> str:
    drafts = f"{'-':>12}{'-':>13}"
    if result.num_drafts:
        drafts = f"{result.acceptance_rate:>12.0%}{result.mean_acceptance_length:>13.2f}"
    return (
        f"{result.name:<16}{_number(result.tokens_per_s, 1):>10}{_number(result.speedup, 2):>10}"
        f"{drafts}{result.num_drafts:>8}{result.num_other_answers:>15}"
    )


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
