"""The flags of `specdec bench serve`, by vLLM's names where it has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from cluster.cli.bench.load_statistics import LATENCIES, LatencyName
from cluster.cli.help import SectionedOption
from specdec.client.calls import DEFAULT_TIMEOUT_S
from specdec.config.methods import METHOD_NAMES

BACKENDS = ("grpc", "openai-chat", "openai")
_DEFAULT_URL = "http://127.0.0.1:8000"

_Command = TypeVar("_Command", bound=Callable[..., Any])
_Item = TypeVar("_Item")


class _List(click.ParamType[tuple[_Item, ...]]):
    """Values with commas between them."""

    def __init__(self, name: str, read: Callable[[str], _Item]) -> None:
        self.name = name
        self._read = read

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[_Item, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(self._read(part.strip()) for part in str(value).split(","))
        except ValueError as error:
            self.fail(f"{value!r}: {error}", param, ctx)


def _concurrency(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= 1024):
        raise ValueError("each has to be a whole number from 1 to 1024")
    return int(text)


def _rate(text: str) -> float:
    rate = float(text)
    if not rate > 0:
        raise ValueError("each has to be a number above 0, or inf")
    return rate


def _percent(text: str) -> float:
    percent = float(text)
    if not 0 <= percent <= 100:
        raise ValueError("each has to be from 0 to 100")
    return percent


def _latency(text: str) -> LatencyName:
    for name in LATENCIES:
        if name == text:
            return name
    raise ValueError(f"each has to be one of {', '.join(LATENCIES)}")


def _objective(text: str) -> tuple[LatencyName, float]:
    name, _, limit = text.partition(":")
    if not float(limit or "nan") > 0:
        raise ValueError("each has to be a latency, a colon, and milliseconds above 0")
    return _latency(name), float(limit)


def _flag(section: str, *names: str, **attributes: Any) -> Callable[[_Command], _Command]:
    return click.option(*names, cls=SectionedOption, section=section, **attributes)


_COUNT = click.IntRange(min=1, max=1_000_000)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_NEW_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)
_SERVICE, _LOAD, _QUESTIONS = "Service", "Load", "What is asked"
_HOW, _REPORT = "How it is answered", "Report"

_FLAGS = (
    _flag(
        _SERVICE,
        "--backend",
        type=click.Choice(BACKENDS),
        default="grpc",
        show_default=True,
        help="Over gRPC, /v1/chat/completions, or /v1/completions.",
    ),
    _flag(
        _SERVICE,
        "--base-url",
        default=_DEFAULT_URL,
        show_default=True,
        help="Of the OpenAI API.",
    ),
    _flag(
        _SERVICE,
        "--model",
        help="Name of the model in requests to the OpenAI API. Default: the first it lists.",
    ),
    _flag(
        _SERVICE,
        "--timeout",
        "timeout_s",
        type=click.FloatRange(min=0, min_open=True),
        default=DEFAULT_TIMEOUT_S,
        show_default=True,
        help="Seconds that one answer may take; over HTTP, that its next part may.",
    ),
    _flag(
        _LOAD,
        "--num-prompts",
        type=_COUNT,
        default=100,
        show_default=True,
        help="Requests of each run.",
    ),
    _flag(
        _LOAD,
        "--max-concurrency",
        type=_List("N,N,...", _concurrency),
        help="Most requests at once; several are measured one after the other. Without a request "
        "rate this is a closed loop. Default: 1, with a request rate no limit.",
    ),
    _flag(
        _LOAD,
        "--request-rate",
        type=_List("R,R,...", _rate),
        help="Requests a second, at random times; several are measured one after the other. inf "
        "sends all at once. Default: the next when one is answered.",
    ),
    _flag(
        _LOAD,
        "--burstiness",
        type=click.FloatRange(min=0, min_open=True),
        default=1.0,
        show_default=True,
        help="Shape of the gamma distribution of the gaps: 1 is a Poisson process, less is more "
        "bursty, more is more even.",
    ),
    _flag(
        _LOAD,
        "--num-warmups",
        type=click.IntRange(min=0, max=10_000),
        default=1,
        show_default=True,
        help="Requests before the first run that are not measured, one after the other.",
    ),
    _flag(
        _LOAD,
        "--seed",
        type=int,
        default=0,
        show_default=True,
        help="Of random prompts, arrivals and sampling.",
    ),
    _flag(
        _QUESTIONS,
        "--dataset-path",
        type=_FILE,
        help='JSON lines of prompts: texts, or objects with "prompt" or "turns". Default: random '
        "words.",
    ),
    _flag(
        _QUESTIONS,
        "--output-len",
        type=_COUNT,
        default=128,
        show_default=True,
        help="Most tokens of an answer to a prompt of the file.",
    ),
    _flag(
        _QUESTIONS,
        "--random-input-len",
        type=_COUNT,
        default=128,
        show_default=True,
        help="Random words of a prompt, each about a token.",
    ),
    _flag(
        _QUESTIONS,
        "--random-output-len",
        type=_COUNT,
        default=128,
        show_default=True,
        help="Tokens of the answer to random words, of which no end-of-sequence token makes fewer.",
    ),
    _flag(
        _QUESTIONS,
        "--random-range-ratio",
        type=click.FloatRange(0, 1, max_open=True),
        default=0.0,
        show_default=True,
        help="By what share both lengths may be less or more.",
    ),
    _flag(
        _QUESTIONS,
        "--random-prefix-len",
        type=click.IntRange(0, 1_000_000),
        default=0,
        show_default=True,
        help="Words before these, the same in all prompts, so that they are in the prefix cache.",
    ),
    _flag(
        _QUESTIONS,
        "--cache-salt/--no-cache-salt",
        "with_cache_salt",
        default=True,
        help="Whether each run has a cache_salt of its own, so that none profits from an earlier "
        "one; no for a service that does not know the field. Default: yes.",
    ),
    _flag(
        _HOW,
        "--temperature",
        type=float,
        default=0.0,
        show_default=True,
        help="From 0 (greedy) to 100.",
    ),
    _flag(
        _HOW,
        "--ignore-eos/--no-ignore-eos",
        default=None,
        help="Whether answers go on to their most tokens. Default: with random words.",
    ),
    _flag(_HOW, "--no-speculation", is_flag=True, help="Have the service draft nothing."),
    _flag(
        _HOW,
        "--num-speculative-tokens",
        type=click.IntRange(0, 32),
        help="Draft tokens a step. Default: the service's choice.",
    ),
    _flag(
        _HOW,
        "--speculation-method",
        "method",
        type=click.Choice(METHOD_NAMES),
        help="What drafts. Default: what is loaded.",
    ),
    _flag(
        _REPORT,
        "--percentile-metrics",
        type=_List("NAME,...", _latency),
        default=",".join(LATENCIES),
        show_default=True,
        help="Latencies to tell of: to the first token, by output token after it, between "
        "messages, to the end.",
    ),
    _flag(
        _REPORT,
        "--metric-percentiles",
        type=_List("P,P,...", _percent),
        default="90,95,99",
        show_default=True,
        help="Percentiles of each.",
    ),
    _flag(
        _REPORT,
        "--goodput",
        type=_List("NAME:MS,...", _objective),
        multiple=True,
        help="Count the requests a second that stay within these, such as ttft:200,tpot:50.",
    ),
    _flag(_REPORT, "--output", type=_NEW_FILE, help="Also write the JSON to this file."),
    _flag(_REPORT, "--plot", type=_NEW_FILE, help="Also draw charts to this file, as SVG."),
)


def load_flags(command: _Command) -> _Command:
    """Gives a command the fields of LoadOptions, where the service is aside."""
    for flag in reversed(_FLAGS):
        command = flag(command)
    return command
