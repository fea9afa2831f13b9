"""Answers to random requests with drafts and without: what differs, and the least that does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from math import inf
from random import Random
from typing import Any
from unittest.mock import patch

from specdec import AsyncLLM, LoRARequest
from specdec.engine.memory import memory_plan
from specdec.llm import llm_engine
from specdec.llm.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from specdec.text.grammar.compiler import GrammarCompiler
from specdec.types.errors import SpecdecError
from specdec.types.reports.stats import Counts
from specdec.types.sampling.sampling_params import SpeculationOptions
from tests.specdec.random_requests import RandomRequest, random_requests
from tests.specdec.random_settings import Checkpoints, RandomSettings

_NUM_AT_ONCE = 8
_TOLERANCE = 2e-3
"""Largest difference of log-probabilities: kernels of torch round by the number of rows."""

_EVENTS = ("num_preemptions", "num_cached_tokens", "num_prefill_chunks", "num_steps_ahead")

Answer = RequestOutput | SpecdecError


@dataclass(frozen=True)
class Outcome:
    """Differences by index of the request, and the counts with drafts."""

    num_requests: int
    differences: Mapping[int, str]
    counts: Counts

    @property
    def totals(self) -> dict[str, int]:
        """Numbers to add over settings."""
        events = {name: getattr(self.counts, name) for name in _EVENTS}
        speculation, num_differing = self.counts.speculation, len(self.differences)
        return {
            "requests": self.num_requests,
            "differing": num_differing,
            "num_draft_tokens": speculation.num_draft_tokens,
            "num_accepted_tokens": speculation.num_accepted_tokens,
            **events,
        }

    def __str__(self) -> str:
        totals = self.totals
        lines = (f"\n  request {index}: {each}" for index, each in self.differences.items())
        return (
            f"{totals['num_accepted_tokens']} of {totals['num_draft_tokens']} draft tokens "
            f"accepted, {totals['differing']} of {self.num_requests} requests differ"
            + "".join(lines)
        )


@dataclass(frozen=True)
class Comparison:
    """Requests to compare in one setting. adapters: those of the target; none without LoRA."""

    settings: RandomSettings
    requests: tuple[RandomRequest, ...]
    adapters: tuple[LoRARequest, ...] = ()

    def run(self) -> Outcome:
        """Answer all requests twice. Raises SpecdecError where the settings are refused."""
        limits, speculation = self.settings.limits, self.settings.speculation
        with _quick_grammars:
            plain = [SpeculationOptions()] * len(self.requests)
            known, _ = asyncio.run(self._answers(plain, {"speculative_config": None}))
            options = list(map(_options, self.requests, known))
            given = {**limits, "speculative_config": speculation}
            with as_on_ranks():
                found, counts = asyncio.run(self._answers(options, given, drafts=True))
        differences = enumerate(map(difference, self.requests, known, found))
        return Outcome(len(known), {index: each for index, each in differences if each}, counts)

    async def _answers(
        self,
        options: Sequence[SpeculationOptions],
        arguments: Mapping[str, Any],
        *,
        drafts: bool = False,
    ) -> tuple[list[Answer], Counts]:
        async with AsyncLLM(**{**self.settings.common, **arguments}) as llm:
            changing = asyncio.create_task(self._change(llm) if drafts else asyncio.sleep(0))
            answers: list[Answer] = []
            for start in range(0, len(options), _NUM_AT_ONCE):
                some = range(start, min(len(options), start + _NUM_AT_ONCE))
                each_of = (
                    self._answer(llm, index, options[index], drafts=drafts) for index in some
                )
                answers += await asyncio.gather(*each_of)
            changing.cancel()
            with suppress(asyncio.CancelledError):
                await changing
            return answers, llm._llm_engine.engine.stats().counts

    async def _answer(
        self, llm: AsyncLLM, index: int, options: SpeculationOptions, *, drafts: bool
    ) -> Answer:
        request = self.requests[index]
        params = replace(request.sampling_params, speculation=options)
        prompt = {"prompt": request.prompt, "cache_salt": request.cache_salt}
        lora = self.adapters[request.adapter - 1] if self.adapters and request.adapter else None
        stream = llm.generate(prompt, params, lora_request=lora)  # type: ignore[arg-type]
        try:
            async for output in stream:
                if drafts and request.is_left_after(sum(len(c.token_ids) for c in output.outputs)):
                    break
        except SpecdecError as error:
            return error
        await stream.aclose()
        return output

    async def _change(self, llm: AsyncLLM) -> None:
        """Set speculation, and then now and again, if the settings have changes."""
        random = Random(repr(self.requests))
        llm.set_speculation(mode=self.settings.mode)
        while self.settings.changes:
            await asyncio.sleep(random.random() * 0.02)
            mode, count = random.choice(("on", "on", "off", "auto")), random.randint(0, 6)
            llm.set_speculation(mode=mode, num_speculative_tokens=count)  # type: ignore[arg-type]


_quick_grammars = patch.object(
    llm_engine, "GrammarCompiler", partial(GrammarCompiler, tries_first=False)
)
"""Compile grammars without the processes that try them first, which take a second to start."""


@contextmanager
def as_on_ranks() -> Iterator[None]:
    """Begin steps and drafts ahead, as where models run in other processes."""
    plan = memory_plan._engine_config

    def with_overlap(*arguments: Any, in_process: bool) -> Any:
        del in_process
        return plan(*arguments, in_process=False)

    with patch.object(memory_plan, "_engine_config", with_overlap):
        yield


def _options(request: RandomRequest, known: Answer) -> SpeculationOptions:
    """Return the options of a request; its prediction is the answer with some characters left out.

    So it is right for long parts.
    """
    if not request.is_predicted or isinstance(known, SpecdecError):
        return SpeculationOptions(**request.speculation)
    text, kept = known.outputs[0].text, Random(request.prompt)
    prediction = "".join(each for each in text if kept.random() < 0.97) or None
    return SpeculationOptions(**request.speculation, prediction=prediction)


def difference(request: RandomRequest, known: Answer, found: Answer) -> str:
    """Return what differs first in a line, "" for nothing; an aborted answer is a beginning."""
    if isinstance(known, SpecdecError) and request.num_until_abort is not None:
        return ""  # it may have been left before
    if isinstance(known, SpecdecError) or isinstance(found, SpecdecError):
        shown = [str(each) if isinstance(each, SpecdecError) else "" for each in (known, found)]
        return "" if shown[0] == shown[1] else f"error {shown[1]!r} instead of {shown[0]!r}"
    is_part = not found.finished or found.outputs[0].finish_reason == "abort"
    for own, other in zip(known.outputs, found.outputs, strict=True):
        own = _beginning(own, other) if is_part else own
        for name in ("token_ids", "text", "text_lengths", "finish_reason", "stop_reason"):
            expected, value = getattr(own, name), getattr(other, name)
            if expected != value:
                return f"choice {own.index}: {name} {value!r} instead of {expected!r}"
        if place := _differing_place(own.logprobs, other.logprobs):
            return f"choice {own.index}: {place}"
    return "" if is_part else _differing_place(known.prompt_logprobs, found.prompt_logprobs)


def _beginning(known: CompletionOutput, part: CompletionOutput) -> CompletionOutput:
    """Return as much of a choice as an aborted answer has."""
    count = len(part.token_ids)
    return replace(
        known,
        token_ids=known.token_ids[:count],
        text=known.text[: len(part.text)],
        text_lengths=part.text_lengths,
        finish_reason=part.finish_reason,
        stop_reason=part.stop_reason,
        logprobs=None if known.logprobs is None else known.logprobs[:count],
    )


def _differing_place(
    known: Sequence[PositionLogprobs | None] | None,
    found: Sequence[PositionLogprobs | None] | None,
) -> str:
    """Compare the values at each place, in descending order: tokens with equal ones may swap."""
    for place, pair in enumerate(zip_longest(known or (), found or (), fillvalue=None)):
        own, other = ([each.logprob for each in (some or {}).values()] for some in pair)
        values = zip_longest(own[:1] + sorted(own), other[:1] + sorted(other), fillvalue=inf)
        if any(abs(a - b) > _TOLERANCE for a, b in values):
            return f"log-probabilities {other} instead of {own} at {place}"
    return ""


def random_comparison(
    name: str, num_requests: int, checkpoints: Checkpoints, method: str
) -> Comparison:
    """Return settings and requests that are a function of a name. method: "" for any."""
    settings = RandomSettings.of(Random(name), checkpoints, method)
    adapters = checkpoints.adapters(settings.family) if settings.has_adapters else ()
    return Comparison(settings, random_requests(name, num_requests), adapters)


def last_differs(comparison: Comparison) -> bool:
    """Return whether the last request differs."""
    try:
        return len(comparison.requests) - 1 in comparison.run().differences
    except SpecdecError:  # settings that need each other
        return False


def reduced(
    comparison: Comparison, index: int, differs: Callable[[Comparison], bool] = last_differs
) -> Comparison:
    """Return the least comparison in which a request still differs: it is the last of it.

    Leaves out other requests, then parameters, then settings, one after the other.
    """
    first, last = comparison.requests[:index], comparison.requests[index]
    least = replace(comparison, requests=(*first, last))
    for smaller in (
        *(partial(_without_requests, size=size) for size in (64, 16, 4, 1)),
        _without_parameters,
        _without_settings,
    ):
        place = 0
        while (found := smaller(least, place)) is not None:
            least, place = (found, place) if differs(found) else (least, place + 1)
    return least


def _without_requests(comparison: Comparison, place: int, *, size: int) -> Comparison | None:
    """Leave out `size` requests before the last one, if there are more at this place."""
    requests, start = comparison.requests, place * size
    if start >= len(requests) - 1:
        return None
    rest = requests[min(start + size, len(requests) - 1) :]
    return replace(comparison, requests=(*requests[:start], *rest))


def _without_parameters(comparison: Comparison, place: int) -> Comparison | None:
    """Leave out a parameter of the last request."""
    *others, last = comparison.requests
    kinds = {name: getattr(last, name) for name in ("params", "speculation")}
    keys = [(kind, key) for kind, values in kinds.items() for key in values]
    if place >= len(keys):
        return None
    kind, key = keys[place]
    values = {name: value for name, value in kinds[kind].items() if name != key}
    return replace(comparison, requests=(*others, replace(last, **{kind: values})))


def _without_settings(comparison: Comparison, place: int) -> Comparison | None:
    """Leave out a limit, or a key of speculative_config that is not its method."""
    settings = comparison.settings
    keys = [("limits", key) for key in settings.limits]
    keys += [("speculation", key) for key in settings.speculation if key not in ("method", "model")]
    if place >= len(keys):
        return None
    kind, key = keys[place]
    values = {name: each for name, each in getattr(settings, kind).items() if name != key}
    return replace(comparison, settings=replace(settings, **{kind: values}))
