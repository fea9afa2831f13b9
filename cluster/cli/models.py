"""`specdec models`: lists the model aliases, downloads models, and shows what would run them."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

import click

from cluster.cli.errors import EXIT_UNUSABLE, exits_as_unusable
from cluster.cli.output import default_flag, json_flag, print_stderr, show_json, show_result
from cluster.cli.tables import aligned

if TYPE_CHECKING:  # commands import these when they run
    from cluster.cli.training.drafter_report import DrafterSpeedReport
    from specdec.config.engine import DTypeName, ModelImpl, ModelOptions
    from specdec.config.kv_cache import KVCacheDType
    from specdec.config.quantization import QuantizationMethod
    from specdec.engine.models.model_report import ModelReport, Precision, RankMemory

DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", "int8", "w8a8", "int4")
MODEL_IMPLS = ("auto", "specdec", "transformers")
KV_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
KERNELS = ("auto", "native", "torch", "triton")

_MAX_FAULTS = 20


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
    show_result({"name": name, "directory": str(directory)}, directory, as_json)


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
@default_flag(
    "--dtype",
    type=click.Choice(DTYPES),
    default="float32",
    help="Data type of weights, activations and KV.",
)
@default_flag(
    "--quantization",
    type=click.Choice(QUANTIZATIONS),
    default="none",
    help="Format of the matrices of linear layers.",
)
@default_flag("--tensor-parallel-size", type=click.IntRange(1), default=1, help="Number of ranks.")
@default_flag("--kernels", type=click.Choice(KERNELS), default="auto", help="Kernels on a CPU.")
@default_flag(
    "--kv-cache-dtype",
    type=click.Choice(KV_DTYPES),
    default="auto",
    help="Data type of keys and values; not with the native kernels of CPUs.",
)
@default_flag(
    "--model-impl",
    type=click.Choice(MODEL_IMPLS),
    default="auto",
    help="Implementation of the model.",
)
@click.option(
    "--enable-expert-parallel",
    is_flag=True,
    help="Divide a mixture of experts over the ranks by expert.",
)
@click.option(
    "--drafters",
    is_flag=True,
    help="Also show the speed of each drafter of an alias on the CPU of this machine, and which "
    "one is chosen; measured for some ten seconds unless it is stored.",
)
@json_flag
def show_model(
    name: str,
    dtype: str,
    quantization: str,
    tensor_parallel_size: int,
    kernels: str,
    kv_cache_dtype: str,
    model_impl: str,
    enable_expert_parallel: bool,
    drafters: bool,
    as_json: bool,
) -> None:
    """Show the architecture of model NAME, its decoder, memory and drafting methods.

    NAME is an alias, a directory, a GGUF file or a Hugging Face Hub id. Its configuration and the
    headers of its weight files are read: lines "note" show what is not used or assumed, lines
    "fault" why it does not load. Then the exit code is 2.
    """
    from specdec.config.engine import ModelOptions
    from specdec.engine.models.model_report import Precision
    from specdec.worker import native_library_fault

    fault = native_library_fault() if kernels in ("auto", "native") else f"kernels is {kernels}"
    precision = Precision(
        cast("DTypeName", dtype),
        None if quantization == "none" else cast("QuantizationMethod", quantization),
        is_native=not fault,
        kv_cache_dtype=cast("KVCacheDType", kv_cache_dtype),
        is_triton=kernels == "triton",
    )
    _require_kv_kernels(precision)
    options = ModelOptions(cast("ModelImpl", model_impl), enable_expert_parallel)
    with exits_as_unusable():
        found = _report(name, precision, tensor_parallel_size, options)
        speeds = _drafters(name, precision, kernels) if drafters else None
    _print_report(found, _decoder(found, fault), speeds, as_json=as_json)


def _report(name: str, precision: Precision, num_ranks: int, options: ModelOptions) -> ModelReport:
    from specdec.config.model_aliases import ALIASES
    from specdec.engine.models.model_report import report_model
    from specdec.models.resolve import resolve

    directory = resolve(name, progress=print_stderr)
    drafters = ALIASES[name].drafters if name in ALIASES else ()
    return report_model(directory, precision, num_ranks, options, drafters)


def _drafters(name: str, precision: Precision, kernels: str) -> DrafterSpeedReport:
    from cluster.cli.training.drafter_report import DrafterSpeedReport
    from specdec.config.llm import LLMConfig
    from specdec.config.model_aliases import ALIASES
    from specdec.llm.drafter_choice import speeds_of_alias

    quantization = precision.quantization or "none"
    settings = {"dtype": precision.dtype, "quantization": quantization, "kernels": kernels}
    config = LLMConfig.from_mapping({"model": name, **settings})
    speeds = speeds_of_alias(config, print_stderr)
    return DrafterSpeedReport.of(ALIASES[name].drafters, speeds)


def _print_report(
    found: ModelReport, decoder: str, speeds: DrafterSpeedReport | None, *, as_json: bool
) -> None:
    """Print a report, and exit with another code for a checkpoint with faults."""
    fields, lines = _fields(found, decoder), aligned(_lines(found, decoder))
    if speeds is not None:
        fields["drafters"] = speeds.fields()
        lines += ["", *speeds.lines()]
    show_result(fields, "\n".join(lines), as_json)
    if found.checkpoint.faults:
        click.get_current_context().exit(EXIT_UNUSABLE)


def _require_kv_kernels(precision: Precision) -> None:
    if precision.kv_cache_dtype != "auto" and precision.is_native:
        raise click.UsageError(
            f"--kv-cache-dtype {precision.kv_cache_dtype} needs --kernels torch or triton: the "
            "native kernels of CPUs read keys and values of 16 and 32 bits"
        )


def _decoder(report: ModelReport, fault: str | None) -> str:
    """Describe what runs a model. fault: why native kernels are not available; None if they are."""
    config = report.config
    if config.transformers is not None:
        return "transformers' modelling code, attention over specdec's KV cache"
    if config.varied is not None:
        return "torch on a CPU: layers of different shapes have no other kernels"
    from specdec.models.config.native_limits import native_fault

    if (lacking := native_fault(config)) is not None and fault != "kernels is triton":
        return f"torch on a CPU: {lacking} have no native kernel"
    if fault:
        return "Triton" if fault == "kernels is triton" else "torch: " + " ".join(fault.split())
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
        "kv_cache_dtype": report.precision.kv_cache_dtype,
        "ranks": [asdict(rank) for rank in report.ranks],
        "end_tokens": [
            {"token_id": token_id, "files": list(files)}
            for token_id, files in report.end_tokens.items()
        ],
        "methods": [asdict(each) for each in report.methods],
        "checkpoint": asdict(report.checkpoint),
    }


def _lines(report: ModelReport, decoder: str) -> list[tuple[str, str]]:
    """Return a label and a value for each line of text."""
    config, precision = report.config, report.precision
    size = f"{config.num_parameters / 1e6:.1f} million weights, {config.num_layers} layers"
    is_kept = precision.is_triton and config.stored_weights and config.stored_quantization
    kept = f"{config.stored_quantization[0]} as stored" if is_kept else "no quantization"
    quantization = precision.quantization or kept
    kv_dtype = precision.kv_cache_dtype
    part = f" (text model of {config.text_part_of})" if config.text_part_of else ""
    return [
        ("directory", str(report.directory)),
        ("architecture", f"{config.architecture}{part}: {report.differences}"),
        ("size", f"{size}, context {config.max_position_embeddings}"),
        ("decoder", decoder),
        ("precision", f"{precision.dtype} ({config.checkpoint_dtype} in files), {quantization}"),
        *([] if kv_dtype == "auto" else [("KV cache", kv_dtype)]),
        ("end tokens", _end_tokens(report)),
        *(
            (
                f"rank {rank}",
                f"{each.weight_bytes / 2**20:.1f} MiB of weights, "
                f"{each.kv_bytes_per_token / 2**10:.1f} KiB of KV a token"
                + (f", {each.num_experts} experts of each mixture" if each.num_experts else "")
                + _states(each),
            )
            for rank, each in enumerate(report.ranks)
        ),
        *((each.method, f"{each.fit}: {each.reason}") for each in report.methods),
        *(("note", each) for each in report.checkpoint.notes),
        *(("fault", each) for each in report.checkpoint.faults[:_MAX_FAULTS]),
    ]


def _states(rank: RankMemory) -> str:
    """Describe the states of recurrent layers; empty without such layers."""
    if not rank.state_bytes:
        return ""
    state, guess = (f"{each / 2**10:.1f} KiB" for each in (rank.state_bytes, rank.guess_bytes))
    return (
        f", {state} of states a sequence and {guess} more a draft token, and a snapshot of the "
        f"states for {rank.snapshot_tokens} tokens of KV"
    )


def _end_tokens(report: ModelReport) -> str:
    named = (f"{each} ({', '.join(files)})" for each, files in report.end_tokens.items())
    return "; ".join(named) or "none: texts end at max_tokens"
