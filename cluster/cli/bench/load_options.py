"""Options of `specdec bench serve`, and the loads, dataset and backend that they select."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from cluster.cli.bench.backend import Backend, GrpcBackend
from cluster.cli.bench.charts import require_matplotlib
from cluster.cli.bench.dataset import (
    Dataset,
    PromptFileDataset,
    RandomDataset,
    read_prompts,
)
from cluster.cli.bench.load import LATENCIES, LatencyName
from cluster.cli.bench.load_flags import (
    concurrency,
    dataset_flag,
    latency,
    load_flag,
    objective,
    percent,
    rate,
    report_flag,
    sampling_flag,
    service_flag,
)
from cluster.cli.bench.load_report import Load
from cluster.cli.options import found_address
from cluster.cli.parameter_types import EXISTING_FILE, NEW_FILE, TIMEOUT, ListOf
from specdec.client.calls import DEFAULT_TIMEOUT_S
from specdec.config.speculation.methods import METHOD_NAMES
from specdec.types.errors import InvalidValueError
from specdec.types.sampling.sampling_params import SamplingParams, SpeculationOptions

BACKENDS = ("grpc", "openai-chat", "openai")
_DEFAULT_URL = "http://127.0.0.1:8000"
_COUNT = click.IntRange(min=1, max=1_000_000)


@dataclass(frozen=True)
class LoadOptions:
    """The flags of the command, with the names of `vllm bench serve` where it has them."""

    address: str | None
    tls_ca_file: Path | None
    api_key: str | None = field(repr=False)
    backend: str = service_flag(
        "API to measure: gRPC, /v1/chat/completions or /v1/completions.",
        click.Choice(BACKENDS),
        default="grpc",
    )
    base_url: str = service_flag("Base URL of the OpenAI API.", default=_DEFAULT_URL)
    model: str | None = service_flag(
        "Model name for the OpenAI API. Default: the first model of /v1/models."
    )
    timeout_s: float | None = service_flag(
        "Timeout in seconds of a request over gRPC, or of each read over HTTP; inf for none.",
        TIMEOUT,
        flag="--timeout",
        default=DEFAULT_TIMEOUT_S,
    )
    num_prompts: int = load_flag("Number of requests in each run.", _COUNT, default=100)
    max_concurrency: tuple[int, ...] | None = load_flag(
        "Maximum number of concurrent requests; a list makes one run per value. Without "
        "--request-rate this is a closed loop. Default: 1, or no limit with --request-rate.",
        ListOf("N,N,...", concurrency),
    )
    request_rate: tuple[float, ...] | None = load_flag(
        "Number of requests per second, with random arrival times; a list makes one run per "
        "value. inf sends all requests at once. Default: a closed loop.",
        ListOf("R,R,...", rate),
    )
    burstiness: float = load_flag(
        "Burstiness of the arrivals, the shape of the gamma distribution of the gaps: 1 is a "
        "Poisson process, less is burstier, more is more uniform.",
        click.FloatRange(min=0, min_open=True),
        default=1.0,
    )
    num_warmups: int = load_flag(
        "Number of sequential warmup requests before the first run; not measured.",
        click.IntRange(min=0, max=10_000),
        default=1,
    )
    seed: int = load_flag("Random seed of prompts, arrivals and sampling.", int, default=0)
    dataset_path: Path | None = dataset_flag(
        'JSON lines file of prompts: strings, or objects with "prompt" or "turns". Default: '
        "random words.",
        EXISTING_FILE,
    )
    output_len: int = dataset_flag(
        "Maximum number of output tokens per request, with --dataset-path.", _COUNT, default=128
    )
    random_input_len: int = dataset_flag(
        "Number of random words per prompt, each about one token.", _COUNT, default=128
    )
    random_output_len: int = dataset_flag(
        "Number of output tokens per request, with random words; ignores end-of-sequence "
        "tokens unless --no-ignore-eos.",
        _COUNT,
        default=128,
    )
    random_range_ratio: float = dataset_flag(
        "Range ratio r: both lengths are drawn uniformly from [(1-r)L, (1+r)L].",
        click.FloatRange(0, 1, max_open=True),
        default=0.0,
    )
    random_prefix_len: int = dataset_flag(
        "Number of prefix words that all prompts share, for the prefix cache.",
        click.IntRange(0, 1_000_000),
        default=0,
    )
    with_cache_salt: bool = dataset_flag(
        "Send a cache_salt per run, so that runs do not share the prefix cache; disable it "
        "for services that reject the field. Default: yes.",
        flag="--cache-salt/--no-cache-salt",
        default=True,
        show_default=False,
    )
    temperature: float = sampling_flag(
        "Sampling temperature, from 0 (greedy) to 100.", float, default=0.0
    )
    ignore_eos: bool | None = sampling_flag(
        "Ignore end-of-sequence tokens and generate the maximum number of tokens. Default: "
        "only with random words.",
        flag="--ignore-eos/--no-ignore-eos",
        default=None,
    )
    no_speculation: bool = sampling_flag("Disable speculative decoding.", is_flag=True)
    num_speculative_tokens: int | None = sampling_flag(
        "Draft length in tokens. Default: the service's.", click.IntRange(0, 32)
    )
    method: str | None = sampling_flag(
        "Drafting method; the service must have loaded it. Default: the service's.",
        click.Choice(METHOD_NAMES),
        flag="--speculation-method",
    )
    percentile_metrics: tuple[LatencyName, ...] = report_flag(
        "Latency metrics to report: time to first token (ttft), time per output token (tpot), "
        "inter-token latency (itl), end-to-end latency (e2el).",
        ListOf("NAME,...", latency),
        default=",".join(LATENCIES),
    )
    metric_percentiles: tuple[float, ...] = report_flag(
        "Percentiles to report of each metric.", ListOf("P,P,...", percent), default="90,95,99"
    )
    goodput: tuple[tuple[tuple[LatencyName, float], ...], ...] = report_flag(
        "Service level objectives in milliseconds, such as ttft:200,tpot:50; reports the "
        "requests per second that meet them.",
        ListOf("NAME:MS,...", objective),
        multiple=True,
    )
    output: Path | None = report_flag("Write the JSON report to this file.", NEW_FILE)
    plot: Path | None = report_flag(
        "Write charts to this file, as SVG.", NEW_FILE, callback=require_matplotlib
    )

    def __post_init__(self) -> None:
        for name in ("output", "plot"):  # fail before the measurement, not after it
            path: Path | None = getattr(self, name)
            if path is not None and not path.parent.is_dir():
                raise InvalidValueError(name, str(path), "in a directory that exists")

    @property
    def loads(self) -> list[Load]:
        """The load of each run, one for each limit or rate.

        Raises InvalidValueError if there are several of both.
        """
        limits, rates = self.max_concurrency or (), self.request_rate or ()
        if len(limits) > 1 and len(rates) > 1:
            limit = "a single value if max_concurrency has several"
            raise InvalidValueError("request_rate", rates, limit)
        if len(rates) > 1 and math.inf in rates:
            raise InvalidValueError("request_rate", rates, "inf alone, or numbers")
        if not limits and not rates:
            return [Load(1, None)]
        finite = [None if math.isinf(rate) else rate for rate in rates] or [None]
        return [Load(limit, rate) for limit in limits or (None,) for rate in finite]

    @property
    def objectives_ms(self) -> dict[LatencyName, float]:
        """Latency limits that a request must meet to count for goodput."""
        return dict(each for group in self.goodput for each in group)

    @property
    def dataset(self) -> Dataset:
        """The prompts of the file, or random words. Raises InvalidValueError."""
        if self.dataset_path is not None:
            prompts = read_prompts(self.dataset_path)
            return PromptFileDataset(prompts, self.output_len, self.with_cache_salt)
        return RandomDataset(
            self.random_input_len,
            self.random_output_len,
            self.random_range_ratio,
            self.random_prefix_len,
            self.seed,
            self.with_cache_salt,
        )

    @property
    def request_options(self) -> SamplingParams:
        """Parameters of all requests; ignore_eos is on by default for random words."""
        ignore_eos = self.dataset_path is None if self.ignore_eos is None else self.ignore_eos
        return SamplingParams(
            temperature=self.temperature,
            seed=self.seed,
            ignore_eos=ignore_eos,
            speculation=SpeculationOptions(
                enabled=False if self.no_speculation else None,
                num_speculative_tokens=self.num_speculative_tokens,
                method=self.method,
            ),
        )

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters that the report lists."""
        parameters = {
            "num_prompts": self.num_prompts,
            "burstiness": self.burstiness,
            "seed": self.seed,
            "temperature": self.temperature,
            "ignore_eos": self.request_options.ignore_eos,
            "speculation": not self.no_speculation,
            "num_speculative_tokens": self.num_speculative_tokens,
            "speculation_method": self.method,
            "goodput_ms": self.objectives_ms,
        }
        if self.dataset_path is not None:
            path = str(self.dataset_path)
            return parameters | {"dataset_path": path, "output_len": self.output_len}
        names = ("input_len", "output_len", "range_ratio", "prefix_len")
        return parameters | {f"random_{name}": getattr(self, f"random_{name}") for name in names}

    def connect(self) -> Backend:
        """Connect to the service. Raises SpecdecError or ClientError."""
        if self.backend == "grpc":
            return GrpcBackend(
                self.address or found_address(),
                self.request_options,
                timeout_s=self.timeout_s,
                api_key=self.api_key,
                tls_ca_file=self.tls_ca_file,
            )
        from cluster.cli.bench.openai_backend import OpenAIBackend

        return OpenAIBackend(
            self.base_url,
            "chat" if self.backend == "openai-chat" else "completions",
            self.request_options,
            timeout_s=self.timeout_s,
            model=self.model,
            api_key=self.api_key,
            tls_ca_file=self.tls_ca_file,
        )
