"""Sampling flags of `specdec generate` and `specdec chat`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from cluster.cli.connection_options import timeout_flag
from cluster.cli.help import combine_flags, section_flag
from specdec.config.methods import METHOD_NAMES
from specdec.types.sampling_params import (
    VERIFIERS,
    SamplingParams,
    SpeculationOptions,
    StructuredOutput,
)

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


_length = partial(section_flag, "Length and stop conditions")
_sampling = partial(section_flag, "Sampling")
_structured = partial(section_flag, "Structured output (mutually exclusive)")
_speculation = partial(section_flag, "Speculation")
_output = partial(section_flag, "Output")

sampling_flags = combine_flags(
    timeout_flag,
    _length(
        "--max-tokens",
        type=int,
        help="Maximum number of tokens to generate. Default: the model's, or up to the context "
        "length.",
    ),
    _length("--min-tokens", type=int, help="Minimum number of tokens to generate. Default: 0."),
    _length("--stop", multiple=True, help="Stop string; may be repeated, up to 16 times."),
    _length(
        "--stop-token-id",
        "stop_token_ids",
        type=int,
        multiple=True,
        help="Token id to stop at; may be repeated, up to 256 times.",
    ),
    _length(
        "--include-stop",
        "include_stop_str_in_output",
        is_flag=True,
        help="Include the stop string in the output.",
    ),
    _length("--ignore-eos", is_flag=True, help="Keep generating after an end-of-sequence token."),
    _length("--show-special-tokens", is_flag=True, help="Show special tokens in the output."),
    _sampling(
        "--temperature",
        type=float,
        help="Sampling temperature, from 0 (greedy) to 100. Default: the model's.",
    ),
    _sampling(
        "--top-p",
        type=float,
        help="Cumulative probability of the tokens to sample from, above 0, at most 1. Default: "
        "the model's.",
    ),
    _sampling(
        "--top-k",
        type=int,
        help="Number of most likely tokens to sample from; 0 for all. Default: the model's.",
    ),
    _sampling(
        "--min-p",
        type=float,
        help="Minimum probability of a token relative to the most likely one, from 0 to 1. "
        "Default: the model's.",
    ),
    _sampling(
        "--repetition-penalty",
        type=float,
        help="Penalty on tokens that occur in the prompt or the output, above 0, at most 100. "
        "Default: the model's.",
    ),
    _sampling(
        "--presence-penalty",
        type=float,
        help="Penalty on tokens that occur in the output, from -2 to 2. Default: 0.",
    ),
    _sampling(
        "--frequency-penalty",
        type=float,
        help="Penalty on tokens by their count in the output, from -2 to 2. Default: 0.",
    ),
    _sampling(
        "--logit-bias",
        type=_TokenBias(),
        multiple=True,
        help="Bias to add to a token's logit, from -100 to 100; may be repeated, up to 1024 times.",
    ),
    _sampling(
        "--bad-word",
        "bad_words",
        multiple=True,
        help="Text that must not be generated; may be repeated.",
    ),
    _sampling(
        "--allowed-token-id",
        "allowed_token_ids",
        type=int,
        multiple=True,
        help="Token id to restrict the output to; may be repeated.",
    ),
    _sampling("--seed", type=int, help="Random seed. Default: chosen by the service."),
    _structured(
        "--json-schema", type=_FILE, help="Generate JSON that matches the schema in this file."
    ),
    _structured("--json-object", is_flag=True, help="Generate a JSON object."),
    _structured("--regex", help="Generate text that matches this regular expression entirely."),
    _structured(
        "--grammar", type=_FILE, help="Generate text that follows the EBNF grammar in this file."
    ),
    _structured(
        "--choice", multiple=True, help="Generate one of the given texts; may be repeated."
    ),
    _speculation("--no-speculation", is_flag=True, help="Disable speculative decoding."),
    _speculation(
        "--num-speculative-tokens",
        type=int,
        help="Number of draft tokens per step, from 0 to 32. Default: the service's.",
    ),
    _speculation(
        "--speculation-method",
        "method",
        type=click.Choice(METHOD_NAMES),
        help="Drafting method; the service must have loaded it. Default: the service's.",
    ),
    _speculation(
        "--verifier",
        type=click.Choice(VERIFIERS),
        help="Method that verifies draft tokens; typical and threshold are lossy. Default: the "
        "service's.",
    ),
    _speculation(
        "--typical-epsilon",
        type=float,
        help="Epsilon of the typical verifier, from 0 to 1. Default: 0.09.",
    ),
    _speculation(
        "--typical-delta",
        type=float,
        help="Delta of the typical verifier, from 0 to 1. Default: 0.3.",
    ),
    _speculation(
        "--acceptance-threshold",
        type=_Threshold(),
        help="Threshold of the threshold verifier: a number from 0 to 1, or a preset (strict, "
        "medium, lenient, auto). Default: auto.",
    ),
    _speculation(
        "--scale-draft-temperature",
        is_flag=True,
        help="Lower the draft temperature where the draft model is confident.",
    ),
)

output_flags = combine_flags(
    _output(
        "-n", "--n", type=int, help="Number of choices to generate, from 1 to 128. Default: 1."
    ),
    _output(
        "--logprobs",
        type=int,
        help="Show log probabilities of the output tokens and of this many most likely "
        "alternatives, from 0 to 20.",
    ),
    _output(
        "--prompt-logprobs",
        type=int,
        help="Show log probabilities of the prompt tokens and of this many most likely "
        "alternatives, from 0 to 20.",
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
