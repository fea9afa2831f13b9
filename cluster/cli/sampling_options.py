"""How the commands that ask for an answer say what kind of answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from cluster.cli.help import SectionedOption
from specdec.client.calls import DEFAULT_TIMEOUT_S
from specdec.config.methods import METHOD_NAMES
from specdec.types.sampling_params import (
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
            self.fail(f"{value!r} is not a token id, =, and a number", param, ctx)


class _Threshold(click.ParamType[float | str]):
    """A number, or a word for SpeculationOptions to judge."""

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


_LENGTH, _SAMPLING, _FORM = "Length and end", "Sampling", "Form of the answer, one of"
_SPECULATION, _REPORT = "Speculation", "What is reported"

_FLAGS = (
    click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(min=0, min_open=True),
        default=DEFAULT_TIMEOUT_S,
        show_default=True,
        help="Seconds that the whole answer may take.",
    ),
    _flag(
        _LENGTH,
        "--max-tokens",
        type=int,
        help="Most tokens to generate. Default: the model's, or what fits.",
    ),
    _flag(_LENGTH, "--min-tokens", type=int, help="Tokens before the answer may end. Default: 0."),
    _flag(_LENGTH, "--stop", multiple=True, help="Text to end before; up to 16 times."),
    _flag(
        _LENGTH,
        "--stop-token-id",
        "stop_token_ids",
        type=int,
        multiple=True,
        help="Token to end at; up to 256 times.",
    ),
    _flag(
        _LENGTH,
        "--include-stop",
        "include_stop_str_in_output",
        is_flag=True,
        help="Show what ended the answer, too.",
    ),
    _flag(_LENGTH, "--ignore-eos", is_flag=True, help="Go on after an end-of-sequence token."),
    _flag(_LENGTH, "--show-special-tokens", is_flag=True, help="Show special tokens as text."),
    _flag(
        _SAMPLING, "--temperature", type=float, help="From 0 (greedy) to 100. Default: the model's."
    ),
    _flag(
        _SAMPLING,
        "--top-p",
        type=float,
        help="Probability to keep, above 0, to 1. Default: the model's.",
    ),
    _flag(
        _SAMPLING, "--top-k", type=int, help="Likely tokens to keep; 0: all. Default: the model's."
    ),
    _flag(
        _SAMPLING,
        "--min-p",
        type=float,
        help="Keep tokens so likely beside the likeliest, from 0 to 1. Default: the model's.",
    ),
    _flag(
        _SAMPLING,
        "--repetition-penalty",
        type=float,
        help="Makes what was said or asked less likely, above 0, to 100. Default: the model's.",
    ),
    _flag(
        _SAMPLING,
        "--presence-penalty",
        type=float,
        help="Makes what was said less likely, from -2 to 2. Default: 0.",
    ),
    _flag(
        _SAMPLING,
        "--frequency-penalty",
        type=float,
        help="The same for each time it was said, from -2 to 2. Default: 0.",
    ),
    _flag(
        _SAMPLING,
        "--logit-bias",
        type=_TokenBias(),
        multiple=True,
        help="Added to a token's logit, from -100 to 100; up to 1024 times.",
    ),
    _flag(_SAMPLING, "--bad-word", "bad_words", multiple=True, help="Text not to say."),
    _flag(
        _SAMPLING,
        "--allowed-token-id",
        "allowed_token_ids",
        type=int,
        multiple=True,
        help="The only tokens to say; may be repeated.",
    ),
    _flag(_SAMPLING, "--seed", type=int, help="Fixes the answer. Default: the service's choice."),
    _flag(_FORM, "--json-schema", type=_FILE, help="JSON that the schema in a file accepts."),
    _flag(_FORM, "--json-object", is_flag=True, help="Any JSON object."),
    _flag(_FORM, "--regex", help="A text that a regular expression matches as a whole."),
    _flag(_FORM, "--grammar", type=_FILE, help="A text of the EBNF grammar in a file."),
    _flag(_FORM, "--choice", multiple=True, help="One of the texts given so."),
    _flag(_SPECULATION, "--no-speculation", is_flag=True, help="Draft nothing: slower."),
    _flag(
        _SPECULATION,
        "--num-speculative-tokens",
        type=int,
        help="Draft tokens a step, from 0 to 32. Default: the service's number.",
    ),
    _flag(
        _SPECULATION,
        "--speculation-method",
        "method",
        type=click.Choice(METHOD_NAMES),
        help="What drafts. Default: what is loaded.",
    ),
    _flag(
        _SPECULATION,
        "--verifier",
        type=click.Choice(VERIFIERS),
        help="What decides on drafts; typical and threshold change the answer. Default: the "
        "service's.",
    ),
    _flag(_SPECULATION, "--typical-epsilon", type=float, help="Of typical. Default: 0.09."),
    _flag(_SPECULATION, "--typical-delta", type=float, help="Of typical. Default: 0.3."),
    _flag(
        _SPECULATION,
        "--acceptance-threshold",
        type=_Threshold(),
        help="Of threshold: from 0 to 1, strict, medium, lenient or auto. Default: auto.",
    ),
    _flag(
        _SPECULATION,
        "--scale-draft-temperature",
        is_flag=True,
        help="Draft more greedily where the draft model is sure.",
    ),
)

_REPORT_FLAGS = (
    _flag(_REPORT, "-n", "--n", type=int, help="Choices to generate, from 1 to 128. Default: 1."),
    _flag(
        _REPORT,
        "--logprobs",
        type=int,
        help="Log-probabilities of the answer's tokens and of so many likely ones, from 0 to 20.",
    ),
    _flag(_REPORT, "--prompt-logprobs", type=int, help="The same for the prompt's tokens."),
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


def answer_flags(command: _Command) -> _Command:
    """Gives a command `timeout_s`, and the arguments of `sampling_params`."""
    for flag in reversed(_FLAGS):
        command = flag(command)
    return command


def report_flags(command: _Command) -> _Command:
    """Gives a command those arguments of `sampling_params` that ask for more than one text."""
    for flag in reversed(_REPORT_FLAGS):
        command = flag(command)
    return command


def sampling_params(**flags: Any) -> SamplingParams:
    """What the flags ask for; those that are not given are left to the service."""
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
    """Of a file its text; bytes that are no UTF-8 are kept, for StructuredOutput to refuse."""
    if isinstance(value, Path):
        return value.read_text(encoding="utf-8", errors="surrogateescape")
    return value
