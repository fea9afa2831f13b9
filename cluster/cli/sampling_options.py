"""Sampling flags of `specdec generate` and `specdec chat`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from cluster.cli.help import SectionedOption
from specdec.client.sync_client import DEFAULT_TIMEOUT_S
from specdec.types.sampling_params import (
    SPECULATION_METHODS,
    VERIFIERS,
    SamplingParams,
    SpeculationOptions,
    StructuredOutput,
)

_Command = TypeVar("_Command", bound=Callable[..., Any])

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class _TokenBias(click.ParamType[tuple[int, float]]):
    name = "ID=BIAS"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, float]:
        token_id, _, bias = str(value).partition("=")
        try:
            return int(token_id), float(bias)
        except ValueError:
            self.fail(f"{value!r} must be TOKEN_ID=BIAS", param, ctx)


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


def _flag(section: str, *names: str, **attributes: Any) -> Callable[[_Command], _Command]:
    return click.option(*names, cls=SectionedOption, section=section, **attributes)


_LENGTH, _SAMPLING = "Length and stop conditions", "Sampling"
_FORM = "Structured output (mutually exclusive)"
_SPECULATION, _OUTPUT = "Speculation", "Output"

_FLAGS = (
    click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(min=0, min_open=True),
        default=DEFAULT_TIMEOUT_S,
        show_default=True,
        help="Timeout of the request in seconds.",
    ),
    _flag(
        _LENGTH,
        "--max-tokens",
        type=int,
        help="Maximum number of tokens to generate. Default: the model's, or up to the context "
        "length.",
    ),
    _flag(
        _LENGTH, "--min-tokens", type=int, help="Minimum number of tokens to generate. Default: 0."
    ),
    _flag(_LENGTH, "--stop", multiple=True, help="Stop string; may be repeated, up to 16 times."),
    _flag(
        _LENGTH,
        "--stop-token-id",
        "stop_token_ids",
        type=int,
        multiple=True,
        help="Token id to stop at; may be repeated, up to 256 times.",
    ),
    _flag(
        _LENGTH,
        "--include-stop",
        "include_stop_str_in_output",
        is_flag=True,
        help="Include the stop string in the output.",
    ),
    _flag(
        _LENGTH,
        "--ignore-eos",
        is_flag=True,
        help="Keep generating after an end-of-sequence token.",
    ),
    _flag(
        _LENGTH, "--show-special-tokens", is_flag=True, help="Show special tokens in the output."
    ),
    _flag(
        _SAMPLING,
        "--temperature",
        type=float,
        help="Sampling temperature, from 0 (greedy) to 100. Default: the model's.",
    ),
    _flag(
        _SAMPLING,
        "--top-p",
        type=float,
        help="Cumulative probability of the tokens to sample from, above 0, at most 1. Default: "
        "the model's.",
    ),
    _flag(
        _SAMPLING,
        "--top-k",
        type=int,
        help="Number of most likely tokens to sample from; 0 for all. Default: the model's.",
    ),
    _flag(
        _SAMPLING,
        "--min-p",
        type=float,
        help="Minimum probability of a token relative to the most likely one, from 0 to 1. "
        "Default: the model's.",
    ),
    _flag(
        _SAMPLING,
        "--repetition-penalty",
        type=float,
        help="Penalty on tokens that occur in the prompt or the output, above 0, at most 100. "
        "Default: the model's.",
    ),
    _flag(
        _SAMPLING,
        "--presence-penalty",
        type=float,
        help="Penalty on tokens that occur in the output, from -2 to 2. Default: 0.",
    ),
    _flag(
        _SAMPLING,
        "--frequency-penalty",
        type=float,
        help="Penalty on tokens by their count in the output, from -2 to 2. Default: 0.",
    ),
    _flag(
        _SAMPLING,
        "--logit-bias",
        type=_TokenBias(),
        multiple=True,
        help="Bias to add to a token's logit, from -100 to 100; may be repeated, up to 1024 times.",
    ),
    _flag(
        _SAMPLING,
        "--bad-word",
        "bad_words",
        multiple=True,
        help="Text that must not be generated; may be repeated.",
    ),
    _flag(
        _SAMPLING,
        "--allowed-token-id",
        "allowed_token_ids",
        type=int,
        multiple=True,
        help="Token id to restrict the output to; may be repeated.",
    ),
    _flag(_SAMPLING, "--seed", type=int, help="Random seed. Default: chosen by the service."),
    _flag(
        _FORM,
        "--json-schema",
        type=_FILE,
        help="Generate JSON that matches the schema in this file.",
    ),
    _flag(_FORM, "--json-object", is_flag=True, help="Generate a JSON object."),
    _flag(_FORM, "--regex", help="Generate text that matches this regular expression entirely."),
    _flag(
        _FORM,
        "--grammar",
        type=_FILE,
        help="Generate text that follows the EBNF grammar in this file.",
    ),
    _flag(_FORM, "--choice", multiple=True, help="Generate one of the given texts; repeatable."),
    _flag(_SPECULATION, "--no-speculation", is_flag=True, help="Disable speculative decoding."),
    _flag(
        _SPECULATION,
        "--num-speculative-tokens",
        type=int,
        help="Number of draft tokens per step, from 0 to 32. Default: the service's.",
    ),
    _flag(
        _SPECULATION,
        "--speculation-method",
        "method",
        type=click.Choice(SPECULATION_METHODS),
        help="Drafting method. Default: the loaded one.",
    ),
    _flag(
        _SPECULATION,
        "--verifier",
        type=click.Choice(VERIFIERS),
        help="Method that verifies draft tokens; typical and threshold are lossy. Default: the "
        "service's.",
    ),
    _flag(
        _SPECULATION,
        "--typical-epsilon",
        type=float,
        help="Epsilon of the typical verifier. Default: 0.09.",
    ),
    _flag(
        _SPECULATION,
        "--typical-delta",
        type=float,
        help="Delta of the typical verifier. Default: 0.3.",
    ),
    _flag(
        _SPECULATION,
        "--acceptance-threshold",
        type=_Threshold(),
        help="Threshold of the threshold verifier: a number from 0 to 1, strict, medium, lenient "
        "or auto. Default: auto.",
    ),
    _flag(
        _SPECULATION,
        "--scale-draft-temperature",
        is_flag=True,
        help="Lower the draft temperature where the draft model is confident.",
    ),
)

_OUTPUT_FLAGS = (
    _flag(
        _OUTPUT,
        "-n",
        "--n",
        type=int,
        help="Number of choices to generate, from 1 to 128. Default: 1.",
    ),
    _flag(
        _OUTPUT,
        "--logprobs",
        type=int,
        help="Show log probabilities of the output tokens and of this many most likely "
        "alternatives, from 0 to 20.",
    ),
    _flag(
        _OUTPUT,
        "--prompt-logprobs",
        type=int,
        help="Show log probabilities of the prompt tokens in the same way.",
    ),
)

_SPECULATION_NAMES = (
    "num_speculative_tokens",
    "method",
    "verifier",
    "typical_epsilon",
    "typical_delta",
    "acceptance_threshold",
    "scale_draft_temperature",
)
_FORM_NAMES = ("json_schema", "json_object", "regex", "grammar", "choice")


def sampling_flags(command: _Command) -> _Command:
    """Add the flags of `timeout_s` and of the arguments of `sampling_params` to a command."""
    for flag in reversed(_FLAGS):
        command = flag(command)
    return command


def output_flags(command: _Command) -> _Command:
    """Add the flags for several choices and log probabilities to a command."""
    for flag in reversed(_OUTPUT_FLAGS):
        command = flag(command)
    return command


def sampling_params(**flags: Any) -> SamplingParams:
    """Create sampling parameters from the flags; the service decides what is not given."""
    given = {name: value for name, value in flags.items() if _is_given(value)}
    speculation = {name: given.pop(name) for name in _SPECULATION_NAMES if name in given}
    if given.pop("no_speculation", False):
        speculation["enabled"] = False
    if given.pop("show_special_tokens", False):
        given["skip_special_tokens"] = False
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    form = {name: _content(given.pop(name)) for name in _FORM_NAMES if name in given}
    return SamplingParams(
        structured_output=StructuredOutput(**form) if form else None,
        speculation=SpeculationOptions(**speculation),
        **given,
    )


def _is_given(value: object) -> bool:
    return value is not None and value is not False and value != ()


def _content(value: object) -> Any:
    """Return a file's text, or the value; StructuredOutput rejects bytes that are not UTF-8."""
    if isinstance(value, Path):
        return value.read_text(encoding="utf-8", errors="surrogateescape")
    return value
