"""Asks a service the same prompts with each speculation method that it has loaded, and with none.

Every prompt is asked of all of them in turn before the next one is, and each time another goes
first: so what else the machine does is the same for all. Each has caches of its own, by its
`cache_salt`, that begin empty: none learns from what another, or an earlier run, was answered.
"""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from cluster.cli.completion_result import Answer, receive
from specdec.client import Client
from specdec.types.chat import ChatMessage
from specdec.types.responses import ModelInfo
from specdec.types.sampling_params import SamplingParams, SpeculationOptions
from specdec.types.stats import SpeculationStats

OFF, AS_CONFIGURED = "off", "as configured"


@dataclass(frozen=True)
class Contender:
    """What is measured: the methods by their names, none of them, or all together."""

    name: str
    options: SpeculationOptions
    cache_salt: str = field(default_factory=secrets.token_urlsafe)


@dataclass(frozen=True)
class MethodResult:
    """Of one contender over all prompts.

    tokens_per_s: the median over prompts, from the first token on; None where no answer had two.
    speedup: the median of this prompt's rate over the same prompt's without speculation.
    acceptance_rate, mean_acceptance_length: of all drafts; 0 and 1 without any.
    num_tokens: of all answers. num_other_answers: prompts whose answer had other tokens than
        without speculation, as a tie between two tokens may have it; a lossy verifier, too.
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
    """What was asked of which model, and what came of it."""

    model: str
    num_prompts: int
    max_tokens: int
    temperature: float
    results: tuple[MethodResult, ...]


def contenders(info: ModelInfo) -> list[Contender]:
    """No speculation first, then each loaded method, then their combination if there is one."""
    found = [Contender(OFF, SpeculationOptions(enabled=False))]
    for name in info.speculation_methods:
        options = SpeculationOptions(method=name)
        found.append(Contender(name, options))
    if len(info.speculation_methods) > 1:
        found.append(Contender(AS_CONFIGURED, SpeculationOptions()))
    return found


def compare(
    client: Client,
    prompts: Sequence[str],
    params: SamplingParams,
    progress: Callable[[], None],
) -> MethodReport:
    """Measures all contenders; `progress` is called after each answer.

    params: of every request, with a temperature and a seed, so that all answers are the same.
    """
    info = client.model_info()
    asked = contenders(info)
    answers: dict[str, list[Answer]] = {each.name: [] for each in asked}
    for prompt, contender in _in_turn(client, prompts, asked):
        settings = replace(params, speculation=contender.options)
        chunks = client.generate_stream(_chat(prompt), settings, cache_salt=contender.cache_salt)
        answers[contender.name].append(receive(chunks, lambda chunk: None))
        progress()
    return MethodReport(
        model=info.model,
        num_prompts=len(prompts),
        max_tokens=params.max_tokens or 0,
        temperature=params.temperature or 0.0,
        results=tuple(_result(each.name, answers) for each in asked),
    )


def _in_turn(
    client: Client, prompts: Sequence[str], asked: Sequence[Contender]
) -> Iterator[tuple[str, Contender]]:
    """Each is run once unmeasured before, so that the KV of its prompt is in the prefix cache."""
    for index, prompt in enumerate(prompts):
        first = index % len(asked)
        for contender in [*asked[first:], *asked[:first]]:
            one_token = SamplingParams(temperature=0, max_tokens=1)
            client.generate(_chat(prompt), one_token, cache_salt=contender.cache_salt)
            yield prompt, contender


def _result(name: str, answers: dict[str, list[Answer]]) -> MethodResult:
    own, plain = answers[name], answers[OFF]
    rates = [_tokens_per_s(answer) for answer in own]
    ratios = [
        rate / base
        for rate, base in zip(rates, map(_tokens_per_s, plain), strict=True)
        if rate is not None and base is not None
    ]
    speculation = SpeculationStats.sum(answer.usage.speculation for answer in own)
    return MethodResult(
        name=name,
        tokens_per_s=_median([rate for rate in rates if rate is not None]),
        speedup=_median(ratios),
        acceptance_rate=speculation.acceptance_rate,
        mean_acceptance_length=speculation.mean_acceptance_length,
        num_drafts=speculation.num_drafts,
        num_tokens=sum(answer.usage.completion_tokens for answer in own),
        num_other_answers=sum(
            _token_ids(answer) != _token_ids(base) for answer, base in zip(own, plain, strict=True)
        ),
    )


def _tokens_per_s(answer: Answer) -> float | None:
    """From the first tokens on, which is without the wait for them."""
    num_first = next((len(chunk.token_ids) for chunk in answer.chunks if chunk.token_ids), 0)
    num_tokens, seconds = answer.usage.completion_tokens, answer.total_s - answer.first_token_s
    return (num_tokens - num_first) / seconds if num_tokens > num_first else None


def _token_ids(answer: Answer) -> tuple[int, ...]:
    return answer.choices[0].token_ids


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _chat(prompt: str) -> list[ChatMessage]:
    return [ChatMessage("user", prompt)]
