"""The flags of `specdec bench serve`, with the names of `vllm bench serve` where it has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from cluster.cli.bench.load_statistics import LATENCIES, LatencyName
from cluster.cli.help import SectionedOption
from specdec.client.sync_client import DEFAULT_TIMEOUT_S
from specdec.types.sampling_params import SPECULATION_METHODS

BACKENDS = ("grpc", "openai-chat", "openai")
_DEFAULT_URL = "http://127.0.0.1:8000"

_Command = TypeVar("_Command", bound=Callable[..., Any])
_Item = TypeVar("_Item")


class _List(click.ParamType[tuple[_Item, ...]]):
    """Comma-separated values."""

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
        raise ValueError("each must be a whole number from 1 to 1024")
    return int(text)


def _rate(text: str) -> float:
    rate = float(text)
    if not rate > 0:
        raise ValueError("each must be a number above 0, or inf")
    return rate


def _percent(text: str) -> float:
    percent = float(text)
    if not 0 <= percent <= 100:
        raise ValueError("each must be from 0 to 100")
    return percent


def _latency(text: str) -> LatencyName:
    for name in LATENCIES:
        if name == text:
            return name
    raise ValueError(f"each must be one of {', '.join(LATENCIES)}")


def _objective(text: str) -> tuple[LatencyName, float]:
    name, _, limit = text.partition(":")
    if not float(limit or "nan") > 0:
        raise ValueError("each must be METRIC:MILLISECONDS, such as ttft:200")
    return _latency(name), float(limit)


def _flag(section: str, *names: str, **attributes: Any) -> Callable[[_Command], _Command]:
    return click.option(*names, cls=SectionedOption, section=section, **attributes)


_COUNT = click.IntRange(min=1, max=1_000_000)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_NEW_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)
_SERVICE, _LOAD, _DATASET = "Service", "Load", "Dataset"
_SAMPLING, _REPORT = "Sampling and speculation", "Report"

_FLAGS = (
    _flag(
        _SERVICE,
        "--backend",
        type=click.Choice(BACKENDS),
        default="grpc",
        show_default=True,
        help="API to measure: gRPC, /v1/chat/completions or /v1/completions.",
    ),
    _flag(
        _SERVICE,
        "--base-url",
        default=_DEFAULT_URL,
        show_default=True,
        help="Base URL of the OpenAI API.",
    ),
    _flag(
        _SERVICE,
        "--model",
        help="Model name for the OpenAI API. Default: the first model of /v1/models.",
    ),
    _flag(
        _SERVICE,
        "--timeout",
        "timeout_s",
        type=click.FloatRange(min=0, min_open=True),
        default=DEFAULT_TIMEOUT_S,
        show_default=True,
        help="Timeout in seconds of a request over gRPC, or of each read over HTTP.",
    ),
    _flag(
        _LOAD,
        "--num-prompts",
        type=_COUNT,
        default=100,
        show_default=True,
        help="Number of requests in each run.",
    ),
    _flag(
        _LOAD,
        "--max-concurrency",
        type=_List("N,N,...", _concurrency),
        help="Maximum number of concurrent requests; a list makes one run per value. Without "
        "--request-rate this is a closed loop. Default: 1, or no limit with --request-rate.",
    ),
    _flag(
        _LOAD,
        "--request-rate",
        type=_List("R,R,...", _rate),
        help="Number of requests per second, with random arrival times; a list makes one run per "
        "value. inf sends all requests at once. Default: a closed loop.",
    ),
    _flag(
        _LOAD,
        "--burstiness",
        type=click.FloatRange(min=0, min_open=True),
        default=1.0,
        show_default=True,
        help="Burstiness of the arrivals, the shape of the gamma distribution of the gaps: 1 is a "
        "Poisson process, less is burstier, more is more uniform.",
    ),
    _flag(
        _LOAD,
        "--num-warmups",
        type=click.IntRange(min=0, max=10_000),
        default=1,
        show_default=True,
        help="Number of sequential warmup requests before the first run; not measured.",
    ),
    _flag(
        _LOAD,
        "--seed",
        type=int,
        default=0,
        show_default=True,
        help="Random seed of prompts, arrivals and sampling.",
    ),
    _flag(
        _DATASET,
        "--dataset-path",
        type=_FILE,
        help='JSON lines file of prompts: strings, or objects with "prompt" or "turns". Default: '
        "random words.",
    ),
    _flag(
        _DATASET,
        "--output-len",
        type=_COUNT,
        default=128,
        show_default=True,
        help="Maximum number of output tokens per request, with --dataset-path.",
    ),
    _flag(
        _DATASET,
        "--random-input-len",
        type=_COUNT,
        default=128,
        show_default=True,
        help="Number of random words per prompt, each about one token.",
    ),
    _flag(
        _DATASET,
        "--random-output-len",
        type=_COUNT,
        default=128,
        show_default=True,
        help="Number of output tokens per request, with random words; ignores end-of-sequence "
        "tokens unless --no-ignore-eos.",
    ),
    _flag(
        _DATASET,
        "--random-range-ratio",
        type=click.FloatRange(0, 1, max_open=True),
        default=0.0,
        show_default=True,
        help="Range ratio r: both lengths are drawn uniformly from [(1-r)L, (1+r)L].",
    ),
    _flag(
        _DATASET,
        "--random-prefix-len",
        type=click.IntRange(0, 1_000_000),
        default=0,
        show_default=True,
        help="Number of prefix words that all prompts share, for the prefix cache.",
    ),
    _flag(
        _DATASET,
        "--cache-salt/--no-cache-salt",
        "with_cache_salt",
        default=True,
        help="Send a cache_salt per run, so that runs do not share the prefix cache; disable it "
        "for services that reject the field. Default: yes.",
    ),
    _flag(
        _SAMPLING,
        "--temperature",
        type=float,
        default=0.0,
        show_default=True,
        help="Sampling temperature, from 0 (greedy) to 100.",
    ),
    _flag(
        _SAMPLING,
        "--ignore-eos/--no-ignore-eos",
        default=None,
        help="Ignore end-of-sequence tokens and generate the maximum number of tokens. Default: "
        "only with random words.",
    ),
    _flag(_SAMPLING, "--no-speculation", is_flag=True, help="Disable speculative decoding."),
    _flag(
        _SAMPLING,
        "--num-speculative-tokens",
        type=click.IntRange(0, 32),
        help="Number of draft tokens per step. Default: the service's.",
    ),
    _flag(
        _SAMPLING,
        "--speculation-method",
        "method",
        type=click.Choice(SPECULATION_METHODS),
        help="Drafting method. Default: the loaded one.",
    ),
    _flag(
        _REPORT,
        "--percentile-metrics",
        type=_List("NAME,...", _latency),
        default=",".join(LATENCIES),
        show_default=True,
        help="Latency metrics to report: time to first token (ttft), time per output token (tpot), "
        "inter-token latency (itl), end-to-end latency (e2el).",
    ),
    _flag(
        _REPORT,
        "--metric-percentiles",
        type=_List("P,P,...", _percent),
        default="90,95,99",
        show_default=True,
        help="Percentiles to report of each metric.",
    ),
    _flag(
        _REPORT,
        "--goodput",
        type=_List("NAME:MS,...", _objective),
        multiple=True,
        help="Service level objectives in milliseconds, such as ttft:200,tpot:50; reports the "
        "requests per second that meet them.",
    ),
    _flag(_REPORT, "--output", type=_NEW_FILE, help="Write the JSON report to this file."),
    _flag(_REPORT, "--plot", type=_NEW_FILE, help="Write charts to this file, as SVG."),
)


def load_flags(command: _Command) -> _Command:
    """Add the flags for the fields of LoadOptions to a command, except the connection flags."""
    for flag in reversed(_FLAGS):
        command = flag(command)
    return command
