"""Options of `specdec bench serve`, and the loads, dataset and backend that they select."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.cli.bench.backend import Backend
from cluster.cli.bench.dataset import Dataset, PromptFileDataset, RandomDataset, RequestOptions
from cluster.cli.bench.load_report import Load
from cluster.cli.bench.load_statistics import LatencyName
from cluster.cli.bench.prompts import read_prompts
from specdec.types.errors import InvalidValueError
from specdec.types.sampling_params import SpeculationOptions


@dataclass(frozen=True)
class LoadOptions:
    """The values of the flags in `load_flags`, which documents them."""

    address: str
    tls_ca_file: Path | None
    api_key: str | None
    backend: str
    base_url: str
    model: str | None
    timeout_s: float
    num_prompts: int
    max_concurrency: tuple[int, ...] | None
    request_rate: tuple[float, ...] | None
    burstiness: float
    num_warmups: int
    seed: int
    dataset_path: Path | None
    output_len: int
    random_input_len: int
    random_output_len: int
    random_range_ratio: float
    random_prefix_len: int
    with_cache_salt: bool
    temperature: float
    ignore_eos: bool | None
    no_speculation: bool
    num_speculative_tokens: int | None
    method: str | None
    percentile_metrics: tuple[LatencyName, ...]
    metric_percentiles: tuple[float, ...]
    goodput: tuple[tuple[tuple[LatencyName, float], ...], ...]
    output: Path | None
    plot: Path | None

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
    def request_options(self) -> RequestOptions:
        """Parameters of all requests; ignore_eos is on by default for random words."""
        ignore_eos = self.dataset_path is None if self.ignore_eos is None else self.ignore_eos
        return RequestOptions(self.temperature, self.seed, ignore_eos, self._speculation)

    @property
    def _speculation(self) -> SpeculationOptions | None:
        if not self.no_speculation and self.num_speculative_tokens is None and self.method is None:
            return None
        return SpeculationOptions(
            enabled=False if self.no_speculation else None,
            num_speculative_tokens=self.num_speculative_tokens,
            method=self.method,
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
            from cluster.cli.bench.grpc_backend import GrpcBackend

            return GrpcBackend(
                self.address,
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
