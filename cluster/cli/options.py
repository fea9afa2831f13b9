"""Flags that several commands share: connection, sampling and output."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import click

from cluster.api.base.authentication import read_token
from cluster.cli.errors import OrderError
from cluster.cli.output import Flag, combine_flags, default_flag, json_flag, section_flag
from cluster.cli.parameter_types import EXISTING_FILE, TIMEOUT
from cluster.config.running_services import running_services
from cluster.config.secrets import API_KEY_VARIABLE, TOKEN_VARIABLE
from specdec.client import AdapterReport, AdminClient, DrafterReport
from specdec.client.calls import DEFAULT_TIMEOUT_S
from specdec.config.speculation.methods import METHOD_NAMES
from specdec.types.sampling.sampling_params import (
    VERIFIERS,
    SamplingParams,
    SpeculationOptions,
    StructuredOutput,
)

DEFAULT_ADDRESS = "127.0.0.1:9000"
ADMIN_FLAG_NAMES = ("address", "tls_ca_file", "token_file", "model")

ReportT = TypeVar("ReportT", DrafterReport, AdapterReport)
_CLIENT_ARGUMENTS = ("address", "timeout_s", "tls_ca_file", "api_key")


def found_address() -> str:
    """Return the address of the only service of this user. Raises UsageError for several."""
    found = {each.grpc_address: each for each in running_services()}
    if len(found) > 1 and DEFAULT_ADDRESS not in found:
        names = ", ".join(f"{', '.join(each.models)} at {at}" for at, each in found.items())
        raise click.UsageError(f"several services run; choose one by --address: {names}")
    return DEFAULT_ADDRESS if len(found) != 1 else next(iter(found))


def _address_flag(default: Callable[[], str] | None) -> Flag:
    return click.option(
        "--address",
        default=default,
        show_default=f"that of the service that you run on this machine, or {DEFAULT_ADDRESS}",
        help="host:port of the service's gRPC API.",
    )


_address = _address_flag(found_address)
tls_ca_flag = click.option(
    "--tls-ca-file",
    type=EXISTING_FILE,
    help="CA certificates (PEM) to verify the service with. Default: no TLS.",
)
api_key_flag = click.option(
    "--api-key",
    envvar=API_KEY_VARIABLE,
    help=f"API key of the service. Default: ${API_KEY_VARIABLE}, which, unlike a flag, is not "
    "visible in the process list.",
)
timeout_flag = default_flag(
    "--timeout",
    "timeout_s",
    type=TIMEOUT,
    default=DEFAULT_TIMEOUT_S,
    help="Timeout of the request in seconds; inf for none.",
)
client_flags = combine_flags(_address, tls_ca_flag, api_key_flag)
load_client_flags = combine_flags(_address_flag(None), tls_ca_flag, api_key_flag)
"""Without an address, which an HTTP service has no use for: call `found_address` for it."""

served_model_flag = click.option(
    "--model",
    default="",
    help="Served model or LoRA adapter to use. Default: the first model.",
)
admin_flags = combine_flags(
    _address,
    tls_ca_flag,
    click.option(
        "--token-file",
        type=EXISTING_FILE,
        help=f"File with the admin token. Default: ${TOKEN_VARIABLE}, or ${API_KEY_VARIABLE}, "
        "which suffices for a service without an admin token, or none.",
    ),
    click.option(
        "--model", default="", help="Model to address, if several are served. Default: the first."
    ),
)


order_flags = combine_flags(
    json_flag,
    admin_flags,
    click.option(
        "--replica",
        "replica_id",
        default="",
        help="Replica to change, as shown by `specdec status`. Default: all replicas.",
    ),
)
"""Flags of an order to the replicas of a service."""


def show_reports(
    reports: Sequence[ReportT], table: Callable[[Sequence[ReportT]], str], as_json: bool
) -> None:
    """Print what all replicas reported."""
    if not as_json:
        click.echo(table(reports))
        return
    from cluster.api.http.admin_json import replicas_json  # imports FastAPI

    click.echo(replicas_json(reports))


def end_order(
    reports: Sequence[ReportT], table: Callable[[Sequence[ReportT]], str], as_json: bool
) -> None:
    """Print the reports about an order.

    Raises OrderError where replicas have not confirmed it, with the first one's fault.
    """
    show_reports(reports, table, as_json)
    faults = [each for each in reports if each.fault]
    if faults:
        count = f"{len(faults)} of {len(reports)} replicas have not confirmed the order"
        raise OrderError(f"{count} ({faults[0].replica_id}: {faults[0].fault})")


class _TokenBias(click.ParamType[tuple[int, float]]):
    name = "ID=BIAS"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, float]:
        token_id, _, bias = str(value).partition("=")
        try:
            return int(token_id), float(bias)
        except ValueError:
            self.fail(f"{value!r} must be ID=BIAS, such as 42=-100", param, ctx)


class _Threshold(click.ParamType[float | str]):
    """A number, or the name of a preset, which SpeculationOptions validates."""

    name = "NUMBER|PRESET"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float | str:
        try:
            return float(value)
        except ValueError:
            return str(value)


_HINTS: Mapping[str, Any] = {
    name: hint
    for options in (StructuredOutput, SpeculationOptions, SamplingParams)
    for name, hint in get_type_hints(options).items()
}
_NAMES: Mapping[str, tuple[str, ...]] = {
    "stop_token_ids": ("--stop-token-id",),
    "include_stop_str_in_output": ("--include-stop",),
    "bad_words": ("--bad-word",),
    "allowed_token_ids": ("--allowed-token-id",),
    "logprob_token_ids": ("--logprob-token-id",),
    "method": ("--speculation-method",),
    "n": ("-n", "--n"),
}
"""Flags that are not named like their field."""

_TYPES: Mapping[str, Any] = {
    "logit_bias": _TokenBias(),
    "json_schema": EXISTING_FILE,
    "grammar": EXISTING_FILE,
    "prediction": EXISTING_FILE,
    "method": click.Choice(METHOD_NAMES),
    "verifier": click.Choice(VERIFIERS),
    "acceptance_threshold": _Threshold(),
}
"""Types that do not follow from the type of the field."""


def _flags(section: str, texts: Mapping[str, str]) -> Flag:
    """Return a section of flags. texts: help by the field of SamplingParams or its parts."""
    return combine_flags(*(_flag(section, name, text) for name, text in texts.items()))


def _flag(section: str, name: str, text: str) -> Flag:
    names = (*_NAMES.get(name, (f"--{name.replace('_', '-')}",)), name)
    hint = _HINTS.get(name, bool)
    kinds = [hint, *get_args(hint)]
    if bool in kinds:
        return section_flag(section, *names, is_flag=True, help=text)
    kinds += [inner for each in kinds for inner in get_args(each)]
    kind = _TYPES.get(name) or next(each for each in (int, float, str) if each in kinds)
    is_multiple = any(get_origin(each) in (tuple, Mapping) for each in kinds)
    return section_flag(section, *names, type=kind, multiple=is_multiple, help=text)


sampling_flags = combine_flags(
    timeout_flag,
    _flags(
        "Length and stop conditions",
        {
            "max_tokens": "Maximum number of tokens to generate. Default: the model's, or up to "
            "the context length.",
            "min_tokens": "Minimum number of tokens to generate. Default: 0.",
            "stop": "Stop string; may be repeated, up to 16 times.",
            "stop_token_ids": "Token id to stop at; may be repeated, up to 256 times.",
            "include_stop_str_in_output": "Include the stop string in the output.",
            "ignore_eos": "Keep generating after an end-of-sequence token.",
            "show_special_tokens": "Show special tokens in the output.",
        },
    ),
    _flags(
        "Sampling",
        {
            "temperature": "Sampling temperature, from 0 (greedy) to 100. Default: the model's.",
            "top_p": "Cumulative probability of the tokens to sample from, above 0, at most 1. "
            "Default: the model's.",
            "top_k": "Number of most likely tokens to sample from; 0 for all. Default: the "
            "model's.",
            "min_p": "Minimum probability of a token relative to the most likely one, from 0 to "
            "1. Default: the model's.",
            "repetition_penalty": "Penalty on tokens that occur in the prompt or the output, "
            "above 0, at most 100. Default: the model's.",
            "presence_penalty": "Penalty on tokens that occur in the output, from -2 to 2. "
            "Default: 0.",
            "frequency_penalty": "Penalty on tokens by their count in the output, from -2 to 2. "
            "Default: 0.",
            "logit_bias": "Bias to add to a token's logit, from -100 to 100; may be repeated, up "
            "to 1024 times.",
            "bad_words": "Text that must not be generated; may be repeated.",
            "allowed_token_ids": "Token id to restrict the output to; may be repeated.",
            "seed": "Random seed. Default: chosen by the service.",
        },
    ),
    _flags(
        "Structured output (mutually exclusive)",
        {
            "json_schema": "Generate JSON that matches the schema in this file.",
            "json_object": "Generate a JSON object.",
            "regex": "Generate text that matches this regular expression entirely.",
            "grammar": "Generate text that follows the EBNF grammar in this file.",
            "choice": "Generate one of the given texts; may be repeated.",
        },
    ),
    _flags(
        "Speculation",
        {
            "no_speculation": "Disable speculative decoding.",
            "num_speculative_tokens": "Draft length, from 0 to 32 tokens. Default: the service's.",
            "method": "Drafting method; the service must have loaded it. Default: the service's.",
            "verifier": "Method that verifies draft tokens; typical, threshold, confidence and "
            "synthetic are lossy. Default: the service's.",
            "typical_epsilon": "Epsilon of the typical verifier, from 0 to 1. Default: 0.09.",
            "typical_delta": "Delta of the typical verifier, from 0 to 1. Default: 0.3.",
            "acceptance_threshold": "Threshold of the threshold and confidence verifiers: a number "
            "from 0 to 1, or a preset (strict, medium, lenient, auto). Default: auto.",
            "scale_draft_temperature": "Lower the draft temperature where the draft model is "
            "confident.",
            "prediction": "Text file that the output is expected to resemble, which is drafted.",
            "draft_confidence_threshold": "End a draft where no token has this probability, from 0 "
            "to 1. Default: the service's.",
        },
    ),
)
output_flags = _flags(
    "Output",
    {
        "n": "Number of choices to generate, from 1 to 128. Default: 1.",
        "logprobs": "Show log probabilities of the output tokens and of this many most likely "
        "alternatives, from 0 to 20.",
        "prompt_logprobs": "Show log probabilities of the prompt tokens and of this many most "
        "likely alternatives, from 0 to 20.",
        "logprob_token_ids": "Token id to show at each position besides; may be repeated.",
    },
)


def pop_connection(flags: dict[str, Any]) -> dict[str, Any]:
    """Remove the arguments of `specdec.client.Client` from `flags` and return them."""
    return {name: flags.pop(name) for name in _CLIENT_ARGUMENTS if name in flags}


def admin_client(
    address: str, tls_ca_file: Path | None, token_file: Path | None, model: str
) -> AdminClient:
    """Create an admin client with the token, or else the API key. Raises InvalidValueError."""
    token = read_token("token_file", token_file) or os.environ.get(API_KEY_VARIABLE)
    return AdminClient(address, tls_ca_file=tls_ca_file, token=token, model=model)


def sampling_params(**flags: Any) -> SamplingParams:
    """Create sampling parameters from the flags; the service decides what is not given."""
    given = {name: value for name, value in flags.items() if _is_given(value)}
    speculation = {
        name: _content(given.pop(name)) for name in _names(SpeculationOptions) & given.keys()
    }
    if given.pop("no_speculation", False):
        speculation["enabled"] = False
    if given.pop("show_special_tokens", False):
        given["skip_special_tokens"] = False
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    form = {name: _content(given.pop(name)) for name in _names(StructuredOutput) & given.keys()}
    return SamplingParams(
        structured_output=StructuredOutput(**form) if form else None,
        speculation=SpeculationOptions(**speculation),
        **given,
    )


def _names(options: type[SpeculationOptions | StructuredOutput]) -> set[str]:
    return {each.name for each in fields(options)}


def _is_given(value: object) -> bool:
    return value is not None and value is not False and value != ()


def _content(value: object) -> Any:
    """Return a file's text, or the value; StructuredOutput rejects bytes that are not UTF-8."""
    if isinstance(value, Path):
        return value.read_text(encoding="utf-8", errors="surrogateescape")
    return value
