"""Flags of `specdec bench serve` that change nothing, beside the others that are given."""

from __future__ import annotations

import math
from collections.abc import Iterator

import click
from click.core import ParameterSource

from cluster.cli.bench.load_options import LoadOptions


def refuse_unused_flags(ctx: click.Context, options: LoadOptions) -> None:
    """Raises UsageError for one on the command line that has no effect."""
    flags = {param.name: param.opts[0] for param in ctx.command.params}
    for name, reason in _unused(options):
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{flags[name]} has no effect {reason}", ctx)


def _unused(options: LoadOptions) -> Iterator[tuple[str, str]]:
    """Names of parameters, and where each would have no effect."""
    if options.backend == "grpc":
        yield "base_url", "with --backend grpc, which asks --address"
        yield "model", "with --backend grpc, which asks the first that is served"
    else:
        yield "address", f"with --backend {options.backend}, which asks --base-url"
        if not options.base_url.startswith("https:"):
            yield "tls_ca_file", "where --base-url does not begin with https:"
    if options.dataset_path is None:
        yield "output_len", "without --dataset-path; of random words it is --random-output-len"
    else:
        for name in ("input_len", "output_len", "range_ratio", "prefix_len"):
            yield f"random_{name}", "with --dataset-path"
    if all(math.isinf(rate) for rate in options.request_rate or ()):
        yield "burstiness", "without a --request-rate that is a number"
