"""Outputs of `LLM` and `AsyncLLM`, with vLLM's names, built from the engine's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from specdec.engine.metrics.metrics import ABORTED
from specdec.engine.metrics.request_metrics import RequestMetrics
from specdec.sequences.sequence import EngineRequest
from specdec.text.tokenizer import Tokenizer
from specdec.types.messages import Logprobs
from specdec.types.reports.stats import SpeculationStats
from specdec.types.responses import EngineOutput
from specdec.types.sampling.sampling_params import VerifierName
from specdec.types.token_display import ShownChoice, ShownOutput, outputs_html

OutputKind = Literal["cumulative", "delta", "final_only"]
"""Whether outputs of a stream are cumulative, hold only new tokens, or there is only one."""


@dataclass(frozen=True)
class Logprob:
    """Log-probability of a token; rank 1 is the most likely token, None unknown."""

    logprob: float
    rank: int | None
    decoded_token: str


PositionLogprobs = dict[int, Logprob]
"""By token id: the sampled token first, then the most likely ones, then logprob_token_ids."""


@dataclass(frozen=True)
class CompletionOutput:
    """One choice.

    finish_reason: stop, length or abort; None while it runs. stop_reason: the stop string or stop
    token that ended it. cumulative_logprob: of all tokens so far; None unless logprobs are
    requested. Beyond vLLM, for each of token_ids: is_drafted, whether it was drafted and accepted;
    text_lengths, the number of characters of text that are final with it.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[PositionLogprobs] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    is_drafted: list[bool] = field(default_factory=list)
    text_lengths: list[int] = field(default_factory=list)

    def finished(self) -> bool:
        """Return whether the choice is complete."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestStats:
    """When a request reached each stage; None for later stages.

    arrival_time: in seconds since the epoch. The other times are of one monotonic clock.
    """

    arrival_time: float
    queued_ts: float | None
    scheduled_ts: float | None
    first_token_ts: float | None
    last_token_ts: float | None
    first_token_latency: float | None
    num_generation_tokens: int


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its completions.

    prompt: None where token ids were given. num_cached_tokens: of the prompt, found in the prefix
    cache. Beyond vLLM: seed, which reproduces the same tokens; speculation, counts of drafted and
    accepted tokens; verifier, the verification method; prediction, the part of speculation whose
    drafts are from `SpeculationOptions.prediction`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestStats
    num_cached_tokens: int
    seed: int
    speculation: SpeculationStats
    verifier: VerifierName
    prediction: SpeculationStats = field(default_factory=SpeculationStats)

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the texts, with their drafted tokens marked."""
        return outputs_html([_shown(self)])


class RequestOutputs(list[RequestOutput]):
    """Outputs of a batch: a list that a notebook shows as it shows each of them."""

    def _repr_html_(self) -> str:
        """Return the HTML of the first outputs."""
        return outputs_html([_shown(each) for each in self])


def _shown(output: RequestOutput) -> ShownOutput:
    choices = [
        ShownChoice(each.text, each.is_drafted, each.text_lengths, each.finish_reason)
        for each in output.outputs
    ]
    return ShownOutput(output.prompt, choices, output.speculation)


class OutputBuilder:
    """Builds a request's outputs, cumulative or delta, from the engine's outputs."""

    def __init__(
        self,
        request: EngineRequest,
        prompt: str | None,
        tokenizer: Tokenizer,
        metrics: RequestMetrics,
        arrival_time: float,
        default_verifier: VerifierName,
    ) -> None:
        """arrival_time: in seconds since the epoch. default_verifier: of requests without one."""
        self._request = request
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._arrival_time = arrival_time
        self._verifier = request.params.speculation.verifier or default_verifier
        first = CompletionOutput(0, "", [], None, None)
        if request.params.logprobs is not None:
            first = replace(first, cumulative_logprob=0.0, logprobs=[])
        # Since the start or the last delta.
        self._choices = [_copy(first, index=index) for index in range(request.params.n)]
        self._changed: set[int] = set()  # choices with something new since the last delta
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        self._last: EngineOutput | None = None
        self._num_cached_tokens = 0
        self._is_finished = False

    def add(self, output: EngineOutput) -> None:
        """Add an output of the engine."""
        choice = self._choices[output.choice]
        choice.token_ids.extend(output.token_ids)
        choice.is_drafted.extend(output.is_drafted)
        choice.text_lengths.extend(output.text_lengths)
        cumulative = choice.cumulative_logprob
        if output.logprobs is not None and choice.logprobs is not None:
            choice.logprobs.extend(self._positions(output.logprobs))
            own = output.logprobs.logprobs[:, 0]
            cumulative = (cumulative or 0.0) + float(own.sum(dtype=float))
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = [None, *self._positions(output.prompt_logprobs)]
        self._choices[output.choice] = replace(
            choice,
            text=choice.text + output.text,
            cumulative_logprob=cumulative,
            finish_reason=output.finish_reason.value if output.finish_reason else None,
            stop_reason=output.stop_reason,
        )
        self._changed.add(output.choice)
        if output.choice == 0:  # it computes the prompt, whose KV the others find cached
            self._num_cached_tokens = output.num_cached_tokens
        self._last, self._is_finished = output, output.is_last

    def abort(self) -> None:
        """End the choices that are not complete."""
        for index, choice in enumerate(self._choices):
            if not choice.finished():
                self._choices[index] = replace(choice, finish_reason=ABORTED)
                self._changed.add(index)
        self._is_finished = True

    def output(self) -> RequestOutput:
        """Return the cumulative output."""
        last = self._last
        return RequestOutput(
            request_id=self._request.request_id,
            prompt=self._prompt,
            prompt_token_ids=list(self._request.prompt_token_ids),
            prompt_logprobs=self._prompt_logprobs,
            outputs=[_copy(choice) for choice in self._choices],
            finished=self._is_finished,
            metrics=self._stats(last.num_output_tokens if last else 0),
            num_cached_tokens=self._num_cached_tokens,
            seed=self._request.seed,
            speculation=last.speculation if last else SpeculationStats(),
            verifier=last.verifier if last else self._verifier,
            prediction=last.prediction if last else SpeculationStats(),
        )

    def delta(self) -> RequestOutput:
        """Return the choices that have something new since the last delta, with that alone."""
        whole = self.output()
        new = [each for each in whole.outputs if each.index in self._changed]
        for index, choice in enumerate(self._choices):
            logprobs: list[PositionLogprobs] | None = None if choice.logprobs is None else []
            self._choices[index] = replace(
                choice, text="", token_ids=[], logprobs=logprobs, is_drafted=[], text_lengths=[]
            )
        self._changed.clear()
        return replace(whole, outputs=new)

    def _stats(self, num_tokens: int) -> RequestStats:
        times = self._metrics
        first_at = times.first_at
        return RequestStats(
            arrival_time=self._arrival_time,
            queued_ts=times.queued_at,
            scheduled_ts=times.scheduled_at,
            first_token_ts=first_at,
            last_token_ts=times.last_at,
            first_token_latency=None if first_at is None else first_at - times.arrived_at,
            num_generation_tokens=num_tokens,
        )

    def _positions(self, logprobs: Logprobs) -> list[PositionLogprobs]:
        rows = zip(
            logprobs.token_ids.tolist(), logprobs.logprobs.tolist(), logprobs.ranks.tolist(),
            strict=True,
        )  # fmt: skip
        num_best = logprobs.num_best
        return [self._position(ids, values, rank, num_best) for ids, values, rank in rows]

    def _position(
        self, token_ids: Sequence[int], values: Sequence[float], rank: int, num_best: int
    ) -> PositionLogprobs:
        """Return the sampled token with its rank, then the best tokens, then the given ones."""
        text_of = self._tokenizer.text_of_token
        num_given = len(token_ids) - 1 - num_best
        ranks = [rank, *range(1, 1 + num_best), *[None] * num_given]
        found: PositionLogprobs = {}
        for token_id, value, place in zip(token_ids, values, ranks, strict=True):
            if place is not None or token_id not in found:
                found[token_id] = Logprob(value, place, text_of(token_id))
        return found


def _copy(choice: CompletionOutput, **changes: Any) -> CompletionOutput:
    """Return a copy with separate lists."""
    logprobs = None if choice.logprobs is None else list(choice.logprobs)
    return replace(
        choice,
        token_ids=list(choice.token_ids),
        logprobs=logprobs,
        is_drafted=list(choice.is_drafted),
        text_lengths=list(choice.text_lengths),
        **changes,
    )
