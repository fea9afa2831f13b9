"""How the commands that ask for an answer say what kind of answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from specdec.client.sync_client import DEFAULT_TIMEOUT_S
from specdec.sampling_params import SamplingParams, SpeculationOptions

_Command = TypeVar("_Command", bound=Callable[..., Any])

_FLAGS = (
    click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(min=0, min_open=True),
        default=DEFAULT_TIMEOUT_S,
        show_default=True,
        help="Seconds that the whole answer may take.",
    ),
    click.option("--max-tokens", type=int, help="Most tokens to generate. Default: what fits."),
    click.option("--temperature", type=float, help="From 0 (greedy) to 100. Default: 1."),
    click.option("--top-p", type=float, help="Probability to keep, above 0, up to 1. Default: 1."),
    click.option("--top-k", type=int, help="Likely tokens to keep; 0 keeps all. Default: 0."),
    click.option("--seed", type=int, help="Fixes the answer. Default: the service chooses one."),
    click.option("--stop", multiple=True, help="Text to end before; may be given up to 16 times."),
    click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-sequence token."),
    click.option("--no-speculation", is_flag=True, help="Draft nothing: the same answer, slower."),
    click.option(
        "--num-speculative-tokens",
        type=int,
        help="Draft tokens a step, from 0 to 32. Default: the service's number.",
    ),
)


def answer_flags(command: _Command) -> _Command:
    """Gives a command `timeout_s`, and the arguments of `sampling_params`."""
    for flag in reversed(_FLAGS):
        command = flag(command)
    return command


def sampling_params(
    *, no_speculation: bool, num_speculative_tokens: int | None, **sampling: Any
) -> SamplingParams:
    """What the flags ask for; those that are not given are left to the service."""
    speculation = SpeculationOptions(
        enabled=False if no_speculation else None, num_speculative_tokens=num_speculative_tokens
    )
    given = {name: value for name, value in sampling.items() if value is not None}
    return SamplingParams(speculation=speculation, **given)
