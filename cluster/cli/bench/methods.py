"""Compares the loaded speculation methods, and no speculation, on the same prompts.

Each prompt is sent with every variant before the next prompt, and each time another variant goes
first, so that other load on the machine affects all variants alike. Each variant has its own
`cache_salt`, so that it does not reuse caches of another variant or an earlier run.
"""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from cluster.cli.completion_result import CompletionResult, receive
from specdec.client import Client
from specdec.types.reports.stats import SpeculationStats
from specdec.types.request import ChatMessage
from specdec.types.responses import ModelInfo
from specdec.types.sampling.sampling_params import SamplingParams, SpeculationOptions

OFF, AS_CONFIGURED = "off", "as configured"


@dataclass(frozen=True)
class Variant:
    """Speculation options to measure: one method, none, or the configured combination."""

    name: str
    options: SpeculationOptions
    cache_salt: str = field(default_factory=secrets.token_urlsafe)


@dataclass(frozen=True)
class MethodResult:
    """Results of one variant over all prompts.

    tokens_per_s: median over the prompts, after the first token; None without a second token.
    speedup: median over the prompts of the ratio to the rate without speculation.
    acceptance_rate, mean_acceptance_length: over all drafts; 0 and 1 without drafts.
    num_tokens: output tokens in total. num_other_answers: prompts whose output differs from the one
        without speculation, due to a tie of two tokens or a lossy verifier.
    """

    name: str
    tokens_per_s: float | None
    speedup: float | None
    acceptance_rate: float
    mean_acceptance_length: float
    num_drafts: int
    num_tokens: int
    num_other_answers: int


@dataclass(frozen=True)
class MethodReport:
    """Parameters and results of the comparison."""

    model: str
    num_prompts: int
    max_tokens: int
    temperature: float
    results: tuple[MethodResult, ...]


def variants(info: ModelInfo) -> list[Variant]:
    """Return no speculation, each loaded method, and the configured combination if there is one."""
    found = [Variant(OFF, SpeculationOptions(enabled=False))]
    for name in info.speculation_methods:
        options = SpeculationOptions(method=name)
        found.append(Variant(name, options))
    if len(info.speculation_methods) > 1:
        found.append(Variant(AS_CONFIGURED, SpeculationOptions()))
    return found


def compare(
    client: Client,
    prompts: Sequence[str],
    params: SamplingParams,
    progress: Callable[[], None],
) -> MethodReport:
    """Measure all variants; `progress` is called after each request.

    params: sampling parameters of every request, with a seed, so that all variants generate the
    same output.
    """
    info = client.model_info()
    measured = variants(info)
    completions: dict[str, list[CompletionResult]] = {each.name: [] for each in measured}
    for prompt, variant in _schedule(client, prompts, measured):
        options = replace(params, speculation=variant.options)
        chunks = client.generate_stream(_chat(prompt), options, cache_salt=variant.cache_salt)
        completions[variant.name].append(receive(chunks, lambda chunk: None))
        progress()
    return MethodReport(
        model=info.model,
        num_prompts=len(prompts),
        max_tokens=params.max_tokens or 0,
        temperature=params.temperature or 0.0,
        results=tuple(
            _result(completions[each.name], completions[OFF], each.name) for each in measured
        ),
    )


def _schedule(
    client: Client, prompts: Sequence[str], measured: Sequence[Variant]
) -> Iterator[tuple[str, Variant]]:
    """Yield all pairs, after a request that puts the prompt into the prefix cache."""
    for index, prompt in enumerate(prompts):
        first = index % len(measured)
        for variant in [*measured[first:], *measured[:first]]:
            one_token = SamplingParams(temperature=0, max_tokens=1)
            client.generate(_chat(prompt), one_token, cache_salt=variant.cache_salt)
            yield prompt, variant


def _result(
    completions: Sequence[CompletionResult], baseline: Sequence[CompletionResult], name: str
) -> MethodResult:
    rates = list(map(_tokens_per_s, completions))
    ratios = [
        rate / base
        for rate, base in zip(rates, map(_tokens_per_s, baseline), strict=True)
        if rate is not None and base is not None
    ]
    speculation = SpeculationStats.sum(each.usage.speculation for each in completions)
    return MethodResult(
        name=name,
        tokens_per_s=_median([rate for rate in rates if rate is not None]),
        speedup=_median(ratios),
        acceptance_rate=speculation.acceptance_rate,
        mean_acceptance_length=speculation.mean_acceptance_length,
        num_drafts=speculation.num_drafts,
        num_tokens=sum(each.usage.completion_tokens for each in completions),
        num_other_answers=sum(
            each.choices[0].token_ids != base.choices[0].token_ids
            for each, base in zip(completions, baseline, strict=True)
        ),
    )


def _tokens_per_s(result: CompletionResult) -> float | None:
    """Return the rate after the first token, which excludes the time to first token."""
    num_first = next((len(chunk.token_ids) for chunk in result.chunks if chunk.token_ids), 0)
    num_tokens, seconds = result.usage.completion_tokens, result.total_s - result.first_token_s
    return (num_tokens - num_first) / seconds if num_tokens > num_first else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _chat(prompt: str) -> list[ChatMessage]:
    return [ChatMessage("user", prompt)]
