"""`/generate`: prepares the calls of a request and builds their answers."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import Field

from cluster.api.base.openai_schema import ResponseModel
from cluster.api.base.sse import event
from cluster.api.openai.builders import (
    RequestContext,
    ResponseBuilder,
    check_batch_admission,
    limit_to_context,
    matched_stop,
    params_for_prompt,
    with_seed,
)
from cluster.api.openai.logprobs import LOWEST_LOGPROB
from cluster.api.openai.schemas.sampling_fields import token_biases
from cluster.api.openai.streams import DONE, PromptOutput
from cluster.api.sglang.encoded_answer import EncodedAnswer
from cluster.api.sglang.schema import (
    DEFAULT_MAX_NEW_TOKENS,
    GenerateRequest,
    SglSamplingParams,
)
from cluster.replica.limits import MAX_TOKEN_IDS, check_model, check_request_id
from cluster.replica.router import Router
from specdec.config.engine import MAX_STREAM_INTERVAL
from specdec.engine.requests.input_processor import MAX_ANSWER_LOGPROBS
from specdec.text.vocab_bytes import TokenBytes
from specdec.types.errors import InvalidValueError
from specdec.types.messages import Logprobs
from specdec.types.request import GenerateRequest as EngineCall
from specdec.types.responses import EngineOutput, FinishReason
from specdec.types.sampling.sampling_params import (
    SamplingParams,
    SpeculationOptions,
    StructuredOutput,
)
from specdec.types.validation import require_count

Entry = tuple[float | None, int, str | None]
"""A token in SGLang's log-probabilities: its log-probability, its id, and its text on request."""


MANY_IDS = 50_000
"""Without log-probabilities, more output ids than this are worth the switch to a thread: an event
copies those before it."""


@dataclass(frozen=True)
class PromptOptions:
    """What a prompt's answer has. num_best: of log-probabilities; None for none.

    listed_ids: tokens with log-probabilities at each position. logprob_start: the first token of
    the prompt that is listed. lists_prompt: whether it and those after it have their values; else
    it is listed alone, without one. has_text: whether tokens are texts, too. is_hidden: whether no
    token was asked for: the engine generates at least one.
    """

    token_ids: tuple[int, ...]
    num_best: int | None
    listed_ids: tuple[int, ...]
    logprob_start: int
    lists_prompt: bool
    has_text: bool
    is_hidden: bool


async def prepare_generate(
    router: Router, request: GenerateRequest, context: RequestContext
) -> GenerateBuilder:
    """Validate and tokenize a request. Raise the errors of its fields."""
    prompts = request.prompts
    sampling = request.of_each("sampling_params", SglSamplingParams())
    ids = _request_ids(request, context.request_id)
    models = [check_model(each) for each in request.of_each("lora_path", "")]
    for model in dict.fromkeys(models):
        check_batch_admission(router, model, len(prompts), request.num_choices)
    calls: list[EngineCall] = []
    options: list[PromptOptions] = []
    num_logprobs = 0
    for index, prompt in enumerate(prompts):
        encoded = await router.text.encode(prompt) if isinstance(prompt, str) else prompt
        token_ids = tuple(encoded)
        require_count("text", len(token_ids), 1, MAX_TOKEN_IDS, "tokens")
        own = _options(request, index, token_ids, sampling[index])
        params = _params(request, sampling[index], own)
        is_seed_given = index == 0 or params.seed is not None
        params = params_for_prompt(with_seed(params, router), index, is_seed_given=is_seed_given)
        interval = None if request.stream else MAX_STREAM_INTERVAL
        num_logprobs += _num_logprobs(own, params, router.max_tokens(params))
        _check_num_logprobs(num_logprobs, own)
        call = EngineCall(
            token_ids,
            params,
            model=models[index],
            request_id=ids[index],
            priority=request.priority,
            stream_interval=interval,
        )
        if sampling[index].max_new_tokens is None:
            call = limit_to_context(call, router.max_model_len)
        calls.append(call)
        options.append(own)
    return GenerateBuilder(request, calls, options, router.text.token_bytes)


def _num_logprobs(options: PromptOptions, params: SamplingParams, max_tokens: int) -> int:
    """Return the most log-probabilities of a prompt's answers, each token's own included."""
    if options.num_best is None:
        return 0
    listed = len(options.token_ids) - options.logprob_start if options.lists_prompt else 0
    return params.n * params.num_listed * (listed + (0 if options.is_hidden else max_tokens))


def _check_num_logprobs(num_logprobs: int, options: PromptOptions) -> None:
    """Limit those of all prompts and answers, which a stream repeats. Raise InvalidValueError."""
    if num_logprobs > MAX_ANSWER_LOGPROBS:
        limit = f"such that all prompts and answers have at most {MAX_ANSWER_LOGPROBS} in all, "
        limit += "each token's own included; lower it, max_new_tokens or n"
        raise InvalidValueError("top_logprobs_num", options.num_best, limit)


def _request_ids(request: GenerateRequest, default: str) -> list[str]:
    count = len(request.prompts)
    if isinstance(request.rid, list):
        return [check_request_id(each) for each in request.of_each("rid", "")]
    return [default] if count == 1 else [f"{default}_{index}" for index in range(count)]


def _options(
    request: GenerateRequest, index: int, token_ids: tuple[int, ...], sampling: SglSamplingParams
) -> PromptOptions:
    has_logprobs = request.of_each("return_logprob", False)[index]
    num_best = request.of_each("top_logprobs_num", 0)[index] if has_logprobs else None
    is_hidden = sampling.max_new_tokens == 0
    # Where there is no answer, all of the prompt is meant, as SGLang's frontend expects.
    start = request.of_each("logprob_start_len", 0 if is_hidden else -1)[index]
    last = len(token_ids) - 1
    return PromptOptions(
        token_ids,
        num_best,
        request.listed_ids[index] if has_logprobs else (),
        last if start < 0 else min(start, last),
        start >= 0 and last > 0,
        request.return_text_in_logprobs,
        is_hidden,
    )


def _params(
    request: GenerateRequest, given: SglSamplingParams, options: PromptOptions
) -> SamplingParams:
    """Build the engine's sampling parameters. Raise InvalidValueError."""
    same = ("n", "temperature", "top_p", "min_p", "repetition_penalty", "top_k")
    values = {name: getattr(given, name) for name in same if getattr(given, name) is not None}
    for name in ("frequency_penalty", "presence_penalty"):
        values[name] = getattr(given, name) or 0.0
    limit = given.max_new_tokens
    stop = given.stop or ()
    speculation = request.speculation
    return SamplingParams(
        **values,
        max_tokens=DEFAULT_MAX_NEW_TOKENS if limit is None else max(1, limit),
        min_tokens=given.min_new_tokens or 0,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(given.stop_token_ids or ()),
        ignore_eos=given.ignore_eos,
        skip_special_tokens=given.skip_special_tokens,
        include_stop_str_in_output=given.no_stop_trim,
        logit_bias=dict(token_biases(given.logit_bias or {})),
        seed=given.sampling_seed,
        logprobs=options.num_best,
        prompt_logprobs=options.num_best if options.lists_prompt else None,
        logprob_token_ids=options.listed_ids,
        structured_output=_structure(given),
        speculation=SpeculationOptions(**speculation.model_dump(exclude_unset=True))
        if speculation
        else SpeculationOptions(),
    )


def _structure(given: SglSamplingParams) -> StructuredOutput | None:
    schema = given.json_schema
    if isinstance(schema, dict):
        schema = json.dumps(schema)
    forms = {"regex": given.regex, "json_schema": schema, "grammar": given.ebnf}
    found = {name: form for name, form in forms.items() if form}
    return StructuredOutput(**found) if found else None  # type: ignore[arg-type]


class Answers(ResponseModel):
    """One answer, or the list of those of a batch."""

    answers: list[dict[str, Any]] = Field(description="by prompt, then by choice")
    is_list: bool

    def to_json(self) -> str:
        """Serialize to one line of JSON."""
        return json.dumps(self.answers if self.is_list else self.answers[0], ensure_ascii=False)


@dataclass
class Answer:
    """The text of one choice so far. began_s: by `time.perf_counter`."""

    call: EngineCall
    options: PromptOptions
    token_bytes: TokenBytes
    began_s: float = field(default_factory=time.perf_counter)
    text: str = ""
    output_ids: list[int] = field(default_factory=list)
    last: EngineOutput | None = None
    _input: list[list[Entry]] = field(default_factory=list)
    _output: list[list[Entry]] = field(default_factory=list)
    _has_input: bool = False  # whether `_input` is complete
    _is_input_sent: bool = False
    _num_steps: int = 0  # that had tokens for it
    _encoded: EncodedAnswer = field(default_factory=EncodedAnswer)

    def add(self, output: EngineOutput) -> None:
        """Append an output."""
        self.last = output
        if output.prompt_logprobs is not None:
            self.add_prompt(output.prompt_logprobs)
        if self.options.is_hidden:
            return
        self.text += output.text
        self.output_ids += output.token_ids
        self._num_steps += output.num_steps
        if output.logprobs is not None:
            self._output += self._entries(output.logprobs)

    def add_prompt(self, logprobs: Logprobs) -> None:
        """Keep the log-probabilities of the prompt; its first token has none."""
        start = max(0, self.options.logprob_start - 1)
        self._input = self._entries(logprobs[slice(start, None)])
        self._has_input = True

    def to_dict(self) -> dict[str, Any]:
        """Return the answer in SGLang's format."""
        meta = self._meta()
        if self.options.num_best is not None:
            meta |= self._input_logprobs() | self._output_logprobs(0)
        return {"text": self.text, "output_ids": self.output_ids, "meta_info": meta}

    def to_event(self, index: int | None) -> str:
        """Return the answer so far as JSON; what was encoded before is not encoded again.

        Log-probabilities of the prompt are in the first event alone. index: of the answer in its
        batch; None outside of a batch.
        """
        meta, start = self._meta(), self._encoded.num_ids
        is_known = self._has_input or not self.options.lists_prompt
        if self.options.num_best is not None and is_known and not self._is_input_sent:
            meta |= self._input_logprobs()
        self._is_input_sent |= is_known
        lists = {} if self.options.num_best is None else self._output_logprobs(start)
        text, token_ids = self.text[self._encoded.num_chars :], self.output_ids[start:]
        return self._encoded.extended(text, token_ids, lists, meta, index)

    def _meta(self) -> dict[str, Any]:
        last = self.last
        assert last is not None, "an answer without an output"
        speculation = last.speculation
        # As SGLang: all steps after the prompt's, whether they had drafts or not.
        num_steps = self._num_steps - 1 if speculation.num_drafts else 0
        return {
            "id": self.call.request_id,
            "finish_reason": self._finish_reason(last),
            "prompt_tokens": last.num_prompt_tokens,
            "completion_tokens": len(self.output_ids),
            "cached_tokens": last.num_cached_tokens,
            "e2e_latency": time.perf_counter() - self.began_s,
            "weight_version": "default",
            "spec_verify_ct": num_steps,
            "spec_accept_length": len(self.output_ids) / num_steps if num_steps else 1.0,
            "spec_accept_rate": speculation.acceptance_rate,
            "seed": self.call.params.seed,
        }

    def _input_logprobs(self) -> dict[str, Any]:
        start = self.options.logprob_start
        first = self.options.token_ids[start]
        has_value = self.options.lists_prompt and start > 0
        opening: list[Entry] = [] if has_value else [(None, first, self._text_of(first))]
        logprobs: dict[str, Any] = {
            "input_token_logprobs": [*opening, *(each[0] for each in self._input)]
        }
        before = [None] * len(opening)
        for name, lists in self._others(self._input).items():
            logprobs[f"input_{name}"] = [*before, *lists]
        return logprobs

    def _output_logprobs(self, start: int) -> dict[str, list[Any]]:
        """Return those of the output from a position on."""
        new = self._output[start:]
        logprobs: dict[str, list[Any]] = {"output_token_logprobs": [each[0] for each in new]}
        return logprobs | {f"output_{name}": each for name, each in self._others(new).items()}

    def _others(self, positions: list[list[Entry]]) -> dict[str, list[list[Entry]]]:
        """Return the lists beside those of the tokens themselves, by the end of their name."""
        num_given, others = len(self.options.listed_ids), dict[str, list[list[Entry]]]()
        if self.options.num_best:
            others["top_logprobs"] = [each[1 : len(each) - num_given] for each in positions]
        if num_given:
            others["token_ids_logprobs"] = [each[-num_given:] for each in positions]
        return others

    def _finish_reason(self, last: EngineOutput) -> dict[str, Any] | None:
        if last.finish_reason is None:
            return None
        if last.finish_reason is FinishReason.LENGTH or self.options.is_hidden:
            return {"type": "length", "length": len(self.output_ids)}
        return {"type": "stop", "matched": matched_stop(last)}

    def _entries(self, logprobs: Logprobs) -> list[list[Entry]]:
        """Return each position's tokens: its own first, then the best ones, then those listed."""
        values = np.maximum(logprobs.logprobs, LOWEST_LOGPROB).tolist()
        rows = zip(logprobs.token_ids.tolist(), values, strict=True)
        return [
            [(value, token, self._text_of(token)) for token, value in zip(*row, strict=True)]
            for row in rows
        ]

    def _text_of(self, token_id: int) -> str | None:
        if not self.options.has_text:
            return None
        return b"".join(self.token_bytes.of([token_id])).decode("utf-8", "replace")


class GenerateBuilder(ResponseBuilder):
    """Builder of the response to a request of `/generate`."""

    def __init__(
        self,
        request: GenerateRequest,
        calls: Sequence[EngineCall],
        options: Sequence[PromptOptions],
        token_bytes: TokenBytes,
    ) -> None:
        """Make a builder; calls and options are by prompt."""
        super().__init__(calls, None)
        self._is_list = request.is_batch or calls[0].params.n > 1
        self._has_logprobs = any(each.num_best is not None for each in options)
        self._answers = [
            [Answer(call, own, token_bytes) for _ in range(call.params.n)]
            for call, own in zip(calls, options, strict=True)
        ]

    def is_large(self, output: EngineOutput) -> bool:
        """Return whether an event is worth the switch to a thread."""
        return self._has_logprobs or output.num_output_tokens > MANY_IDS

    @property
    def is_body_large(self) -> bool:
        """Return whether the complete response may have many log-probabilities."""
        return self._has_logprobs

    def body(self) -> Answers:
        """Build the complete response."""
        answers = [answer.to_dict() for choices in self._answers for answer in choices]
        return Answers(answers=answers, is_list=self._is_list)

    def events(self, each: PromptOutput) -> list[bytes]:
        """Encode the whole text so far, as SGLang does; of a batch with the index of its prompt."""
        self.add(each)
        answer, index = self._answers[each.prompt][each.output.choice], None
        if self._is_list:
            before = sum(len(choices) for choices in self._answers[: each.prompt])
            index = before + each.output.choice
        return [event(answer.to_event(index))]

    def closing(self) -> list[bytes]:
        """Encode the end."""
        return [DONE]

    def add(self, each: PromptOutput) -> None:
        """Add an output to the response."""
        choices = self._answers[each.prompt]
        choices[each.output.choice].add(each.output)
        if each.output.prompt_logprobs is not None:
            for other in choices:
                other.add_prompt(each.output.prompt_logprobs)
