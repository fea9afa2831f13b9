"""`specdec models`: lists the model aliases, downloads models, and shows what would run them."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

import click

from cluster.cli.output import json_flag, print_stderr, show_json

if TYPE_CHECKING:  # commands import these when they run
    from specdec.config.engine import DTypeName, ModelImpl
    from specdec.config.quantization import QuantizationMethod
    from specdec.engine.model_report import ModelReport

DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", "int8", "w8a8")
MODEL_IMPLS = ("auto", "specdec", "transformers")
KERNELS = ("auto", "native", "torch", "triton")


@click.group()
def models() -> None:
    """List model aliases, download models, and show what would run them."""


@models.command("fetch", short_help="Download a model.")
@click.argument("name")
@json_flag
def fetch_model(name: str, as_json: bool) -> None:
    """Download model NAME, an alias or a Hugging Face Hub id, and print its directory."""
    from specdec.models.resolve import resolve

    directory = resolve(name, progress=print_stderr)
    if as_json:
        show_json({"name": name, "directory": str(directory)})
        return
    click.echo(directory)


@models.command("list", short_help="List the model aliases.")
@json_flag
def list_models(as_json: bool) -> None:
    """List the model aliases and whether they are in the cache."""
    from specdec.config.hardware import default_cache_dir
    from specdec.config.model_aliases import ALIASES
    from specdec.models.resolve import packaged_directory

    found = []
    for name, source in ALIASES.items():
        place = packaged_directory(name, default_cache_dir())
        directory = str(place) if place.is_dir() else None
        size = source.download_bytes
        found.append({"name": name, "directory": directory, "download_bytes": size})
        if not as_json:
            click.echo(f"{name}\t{directory or f'not fetched ({size / 1e6:.0f} MB)'}")
    if as_json:
        show_json({"models": found})


@models.command("show", short_help="Show what would run a model.")
@click.argument("name")
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="float32",
    show_default=True,
    help="Data type of weights, activations and KV.",
)
@click.option(
    "--quantization",
    type=click.Choice(QUANTIZATIONS),
    default="none",
    show_default=True,
    help="Format of the matrices of linear layers.",
)
@click.option(
    "--tensor-parallel-size",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Number of ranks.",
)
@click.option(
    "--kernels",
    type=click.Choice(KERNELS),
    default="auto",
    show_default=True,
    help="Kernels on a CPU.",
)
@click.option(
    "--model-impl",
    type=click.Choice(MODEL_IMPLS),
    default="auto",
    show_default=True,
    help="Implementation of the model.",
)
@click.option(
    "--enable-expert-parallel",
    is_flag=True,
    help="Divide a mixture of experts over the ranks by expert.",
)
@json_flag
def show_model(
    name: str,
    dtype: str,
    quantization: str,
    tensor_parallel_size: int,
    kernels: str,
    model_impl: str,
    enable_expert_parallel: bool,
    as_json: bool,
) -> None:
    """Show the architecture of model NAME, its decoder, memory and drafting methods.

    NAME is an alias, a directory, a GGUF file or a Hugging Face Hub id. Its configuration is read;
    its weights are not loaded.
    """
    from specdec.config.engine import ModelOptions
    from specdec.engine.model_report import Precision, report_model
    from specdec.models.resolve import resolve
    from specdec.worker import native_library_fault

    fault = native_library_fault() if kernels in ("auto", "native") else f"kernels is {kernels}"
    precision = Precision(
        cast("DTypeName", dtype),
        None if quantization == "none" else cast("QuantizationMethod", quantization),
        is_native=not fault,
    )
    directory = resolve(name, progress=print_stderr)
    options = ModelOptions(cast("ModelImpl", model_impl), enable_expert_parallel)
    found = report_model(directory, precision, tensor_parallel_size, options)
    decoder = _decoder(found, fault)
    if as_json:
        show_json(_fields(found, decoder))
        return
    click.echo("\n".join(f"{label:18}{value}" for label, value in _lines(found, decoder)))


def _decoder(report: ModelReport, fault: str | None) -> str:
    """Describe what runs a model. fault: why native kernels are not available; None if they are."""
    config = report.config
    if config.transformers is not None:
        return "transformers' modelling code, attention over specdec's KV cache"
    if fault:
        return "torch: " + " ".join(fault.split())
    return "native C++ kernels"


def _fields(report: ModelReport, decoder: str) -> dict[str, Any]:
    config = report.config
    return {
        "directory": str(report.directory),
        "architecture": config.architecture,
        "text_part_of": config.text_part_of,
        "differences": report.differences,
        "num_parameters": config.num_parameters,
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "max_model_len": config.max_position_embeddings,
        "decoder": decoder,
        "dtype": report.precision.dtype,
        "checkpoint_dtype": config.checkpoint_dtype,
        "quantization": report.precision.quantization or "none",
        "ranks": [asdict(rank) for rank in report.ranks],
        "methods": [asdict(each) for each in report.methods],
    }


def _lines(report: ModelReport, decoder: str) -> list[tuple[str, str]]:
    """Return a label and a value for each line of text."""
    config, precision = report.config, report.precision
    size = f"{config.num_parameters / 1e6:.1f} million weights, {config.num_layers} layers"
    quantization = precision.quantization or "no quantization"
    part = f" (text model of {config.text_part_of})" if config.text_part_of else ""
    return [
        ("directory", str(report.directory)),
        ("architecture", f"{config.architecture}{part}: {report.differences}"),
        ("size", f"{size}, context {config.max_position_embeddings}"),
        ("decoder", decoder),
        ("precision", f"{precision.dtype} ({config.checkpoint_dtype} in files), {quantization}"),
        *(
            (
                f"rank {rank}",
                f"{each.weight_bytes / 2**20:.1f} MiB of weights, "
                f"{each.kv_bytes_per_token / 2**10:.1f} KiB of KV a token"
                + (f", {each.num_experts} experts of each mixture" if each.num_experts else ""),
            )
            for rank, each in enumerate(report.ranks)
        ),
        *((each.method, f"{each.fit}: {each.reason}") for each in report.methods),
    ]
