"""The flags of `specdec bench serve`, with the names of `vllm bench serve` where it has them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from cluster.cli.bench.load_statistics import LATENCIES, LatencyName
from cluster.cli.help import combine_flags, section_flag
from specdec.client.calls import DEFAULT_TIMEOUT_S
from specdec.config.methods import METHOD_NAMES

BACKENDS = ("grpc", "openai-chat", "openai")
_DEFAULT_URL = "http://127.0.0.1:8000"

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
    with suppress(ValueError):
        if (rate := float(text)) > 0:
            return rate
    raise ValueError("each must be a number above 0, or inf")


def _percent(text: str) -> float:
    with suppress(ValueError):
        if 0 <= (percent := float(text)) <= 100:
            return percent
    raise ValueError("each must be a number from 0 to 100")


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


_COUNT = click.IntRange(min=1, max=1_000_000)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_NEW_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)

_service = partial(section_flag, "Service")
_load = partial(section_flag, "Load")
_dataset = partial(section_flag, "Dataset")
_sampling = partial(section_flag, "Sampling and speculation")
_report = partial(section_flag, "Report")

load_flags = combine_flags(
    _service(
        "--backend",
        type=click.Choice(BACKENDS),
        default="grpc",
        show_default=True,
        help="API to measure: gRPC, /v1/chat/completions or /v1/completions.",
    ),
    _service(
        "--base-url", default=_DEFAULT_URL, show_default=True, help="Base URL of the OpenAI API."
    ),
    _service(
        "--model", help="Model name for the OpenAI API. Default: the first model of /v1/models."
    ),
    _service(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(min=0, min_open=True),
        default=DEFAULT_TIMEOUT_S,
        show_default=True,
        help="Timeout in seconds of a request over gRPC, or of each read over HTTP.",
    ),
    _load(
        "--num-prompts",
        type=_COUNT,
        default=100,
        show_default=True,
        help="Number of requests in each run.",
    ),
    _load(
        "--max-concurrency",
        type=_List("N,N,...", _concurrency),
        help="Maximum number of concurrent requests; a list makes one run per value. Without "
        "--request-rate this is a closed loop. Default: 1, or no limit with --request-rate.",
    ),
    _load(
        "--request-rate",
        type=_List("R,R,...", _rate),
        help="Number of requests per second, with random arrival times; a list makes one run per "
        "value. inf sends all requests at once. Default: a closed loop.",
    ),
    _load(
        "--burstiness",
        type=click.FloatRange(min=0, min_open=True),
        default=1.0,
        show_default=True,
        help="Burstiness of the arrivals, the shape of the gamma distribution of the gaps: 1 is a "
        "Poisson process, less is burstier, more is more uniform.",
    ),
    _load(
        "--num-warmups",
        type=click.IntRange(min=0, max=10_000),
        default=1,
        show_default=True,
        help="Number of sequential warmup requests before the first run; not measured.",
    ),
    _load(
        "--seed",
        type=int,
        default=0,
        show_default=True,
        help="Random seed of prompts, arrivals and sampling.",
    ),
    _dataset(
        "--dataset-path",
        type=_FILE,
        help='JSON lines file of prompts: strings, or objects with "prompt" or "turns". Default: '
        "random words.",
    ),
    _dataset(
        "--output-len",
        type=_COUNT,
        default=128,
        show_default=True,
        help="Maximum number of output tokens per request, with --dataset-path.",
    ),
    _dataset(
        "--random-input-len",
        type=_COUNT,
        default=128,
        show_default=True,
        help="Number of random words per prompt, each about one token.",
    ),
    _dataset(
        "--random-output-len",
        type=_COUNT,
        default=128,
        show_default=True,
        help="Number of output tokens per request, with random words; ignores end-of-sequence "
        "tokens unless --no-ignore-eos.",
    ),
    _dataset(
        "--random-range-ratio",
        type=click.FloatRange(0, 1, max_open=True),
        default=0.0,
        show_default=True,
        help="Range ratio r: both lengths are drawn uniformly from [(1-r)L, (1+r)L].",
    ),
    _dataset(
        "--random-prefix-len",
        type=click.IntRange(0, 1_000_000),
        default=0,
        show_default=True,
        help="Number of prefix words that all prompts share, for the prefix cache.",
    ),
    _dataset(
        "--cache-salt/--no-cache-salt",
        "with_cache_salt",
        default=True,
        help="Send a cache_salt per run, so that runs do not share the prefix cache; disable it "
        "for services that reject the field. Default: yes.",
    ),
    _sampling(
        "--temperature",
        type=float,
        default=0.0,
        show_default=True,
        help="Sampling temperature, from 0 (greedy) to 100.",
    ),
    _sampling(
        "--ignore-eos/--no-ignore-eos",
        default=None,
        help="Ignore end-of-sequence tokens and generate the maximum number of tokens. Default: "
        "only with random words.",
    ),
    _sampling("--no-speculation", is_flag=True, help="Disable speculative decoding."),
    _sampling(
        "--num-speculative-tokens",
        type=click.IntRange(0, 32),
        help="Number of draft tokens per step. Default: the service's.",
    ),
    _sampling(
        "--speculation-method",
        "method",
        type=click.Choice(METHOD_NAMES),
        help="Drafting method; the service must have loaded it. Default: the service's.",
    ),
    _report(
        "--percentile-metrics",
        type=_List("NAME,...", _latency),
        default=",".join(LATENCIES),
        show_default=True,
        help="Latency metrics to report: time to first token (ttft), time per output token (tpot), "
        "inter-token latency (itl), end-to-end latency (e2el).",
    ),
    _report(
        "--metric-percentiles",
        type=_List("P,P,...", _percent),
        default="90,95,99",
        show_default=True,
        help="Percentiles to report of each metric.",
    ),
    _report(
        "--goodput",
        type=_List("NAME:MS,...", _objective),
        multiple=True,
        help="Service level objectives in milliseconds, such as ttft:200,tpot:50; reports the "
        "requests per second that meet them.",
    ),
    _report("--output", type=_NEW_FILE, help="Write the JSON report to this file."),
    _report("--plot", type=_NEW_FILE, help="Write charts to this file, as SVG."),
)
"""The flags for the fields of LoadOptions, except the connection flags."""
