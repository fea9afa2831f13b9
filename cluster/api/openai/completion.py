"""`/v1/completions`: prepares completions of texts and builds their response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile
from operator import eq
from typing import Any, Literal

from cluster.api.openai.builders import (
    ChoicesBuilder,
    ChoiceWriter,
    RequestContext,
    ResponseInfo,
    TextDelta,
    check_batch_admission,
    generate_call,
    limit_to_context,
    matched_stop,
    params_for_prompt,
    prompt_token_ids,
    token_names,
    with_seed,
)
from cluster.api.openai.logprobs import (
    CompletionLogprobs,
    CompletionLogprobsWriter,
    TokenNames,
    concatenate,
    prompt_logprobs,
)
from cluster.api.openai.parsers.pieces import Content
from cluster.api.openai.schemas.completion_schema import (
    DEFAULT_MAX_TOKENS,
    MAX_PROMPTS,
    CompletionChoice,
    CompletionRequest,
)
from cluster.api.openai.schemas.sampling_fields import requested_structure, sampling_params
from cluster.replica.limits import MAX_TEXT_CHARS, MAX_TOKEN_IDS
from cluster.replica.router import Router
from specdec.engine.requests.input_processor import MAX_ANSWER_LOGPROBS
from specdec.engine.requests.outputs import joined
from specdec.text.detokenizer import IncrementalDetokenizer
from specdec.text.tokenizer import Tokenizer
from specdec.types.errors import InvalidValueError
from specdec.types.messages import Logprobs
from specdec.types.request import GenerateRequest
from specdec.types.responses import EngineOutput, FinishReason
from specdec.types.sampling.sampling_params import SamplingParams
from specdec.types.validation import require_count

_NULLS = dict.fromkeys(CompletionChoice.model_fields)
"""Chunks leave out fields without a value; complete choices do not."""


async def prepare_completion(
    router: Router, request: CompletionRequest, context: RequestContext
) -> CompletionBuilder:
    """Validate and tokenize a request. Raise the errors of its fields."""
    request.check_together()
    if request.max_tokens == 0 and not request.echo:
        raise InvalidValueError("max_tokens", 0, "at least 1 unless echo is true")
    if request.max_tokens == 0 and request.receipt:
        raise InvalidValueError("receipt", True, "false where max_tokens is 0: there is no answer")
    prompts = _prompts(request)
    num_prompts = len(prompts)
    check_batch_admission(router, request.model or "", num_prompts, num_prompts * (request.n or 1))
    params = completion_params(request)
    request.check_resumption(params, echo=request.echo, prompt=_several(prompts))
    is_seed_given = params.seed is not None
    params = with_seed(params, router)
    calls, echoes = list[GenerateRequest](), list[Echo]()
    for index, prompt in enumerate(prompts):
        token_ids = await prompt_token_ids(
            router, request, prompt, add_special_tokens=request.add_special_tokens
        )
        echoes.append(await _echo(router, request, prompt, token_ids))
        own = params_for_prompt(params, index, is_seed_given=is_seed_given)
        call = generate_call(router, request, token_ids, own, context.request_id)
        if request.max_tokens is None:
            call = limit_to_context(call, router.max_model_len)
        calls.append(call)
    _check_num_logprobs(request, params, echoes, router.max_tokens(params))
    needs_names = request.logprobs is not None or request.prompt_logprobs is not None
    info = ResponseInfo.of(f"cmpl-{context.request_id}", router, params, request.model)
    names = token_names(router, request) if needs_names else None
    builder = CompletionBuilder(request, calls, info, names, echoes, router.text.tokenizer)
    if request.resume_token_ids and (logprobs := builder.writers[0].logprobs):
        await logprobs.resume(router.text, request.resume_token_ids)
    return builder


class CompletionBuilder(ChoicesBuilder["CompletionWriter"]):
    """Builder of the response to a completion of one or several prompts."""

    kind = chunk_kind = "text_completion"

    def __init__(
        self,
        request: CompletionRequest,
        calls: Sequence[GenerateRequest],
        info: ResponseInfo,
        names: TokenNames | None,
        echoes: Sequence[Echo],
        tokenizer: Tokenizer,
    ) -> None:
        """Make a builder for calls of the prompts in `echoes`."""
        of_choices = [echo for echo in echoes for _ in range(calls[0].params.n)]
        writers = [
            CompletionWriter(i, request, names, each, tokenizer)
            for i, each in enumerate(of_choices)
        ]
        super().__init__(request, calls, info, names, writers)
        self._echoes_prompt = request.echo
        self._hides_output = request.max_tokens == 0  # the engine generates at least one token

    def is_large(self, output: EngineOutput) -> bool:
        """Return whether an output is worth converting on a thread, as a scored echo is."""
        return (self._echoes_prompt and self.names is not None) or super().is_large(output)

    def usage(self) -> dict[str, Any]:
        """Return the usage so far."""
        return self.meter.usage(self.meter.num_output_tokens if self._hides_output else 0)


@dataclass
class Echo:
    """The prompt of some choices, for `echo`.

    text: empty without `echo`. lengths: its characters with each token; empty where they are not
    needed. logprobs: of its tokens from the second on; the first output of the prompt has them.
    """

    token_ids: tuple[int, ...]
    text: str = ""
    lengths: Sequence[int] = ()
    logprobs: Logprobs | None = None

    def note(self, output: EngineOutput) -> None:
        """Keep the log-probabilities of the prompt, if the output has them."""
        if output.prompt_logprobs is not None:
            self.logprobs = output.prompt_logprobs


class CompletionWriter(ChoiceWriter):
    """Builder of one choice.

    With `echo`, the first chunk starts with the prompt, and its log-probabilities with those of the
    prompt's tokens; the first of these is null.

    logprobs: converter of the tokens' log-probabilities, if they are requested.
    """

    def __init__(
        self,
        index: int,
        request: CompletionRequest,
        names: TokenNames | None,
        echo: Echo,
        tokenizer: Tokenizer,
    ) -> None:
        """Make a builder; `names` is None without log-probabilities, `echo` that of the prompt."""
        super().__init__()
        self._index = index
        self._request = request
        self._names = names
        self._echo = echo
        self._has_started = False
        self._is_plain = names is None and not request.return_token_ids and request.max_tokens != 0
        self.logprobs: CompletionLogprobsWriter | None = None
        if names is not None and request.logprobs is not None:
            shows = request.skip_special_tokens is False
            detokenizer = IncrementalDetokenizer(tokenizer, (), not shows, before=echo.token_ids)
            self.logprobs = CompletionLogprobsWriter(names, detokenizer, echo.lengths)

    def delta(self, output: EngineOutput) -> dict[str, Any] | TextDelta | None:
        """Convert an output to a chunk's choice; return None if it adds nothing visible."""
        if self._is_plain and self._has_started and output.finish_reason is None:
            return Content(output.text) if output.text else None
        return self._chunk(output)

    def text_chunk(self, delta: TextDelta) -> dict[str, Any]:
        """Return the choice in a chunk that adds only a text."""
        return {"index": self._index, "text": delta.text, "logprobs": None, "finish_reason": None}

    def _chunk(self, output: EngineOutput) -> dict[str, Any] | None:
        is_first = not self._has_started
        fields = self._fields([output])
        is_visible = is_first or output.finish_reason or fields["text"] or fields["logprobs"]
        return fields if is_visible or fields.get("token_ids") else None

    def add(self, output: EngineOutput) -> None:
        """Keep an output for `choice`."""
        self._echo.note(output)
        super().add(output)

    def choice(self) -> dict[str, Any]:
        """Return the fields of the complete choice, from the outputs that were added."""
        return {**_NULLS, **self._fields(self.outputs)}

    def _fields(self, outputs: Sequence[EngineOutput]) -> dict[str, Any]:
        """Return the fields of the choice with these outputs."""
        output = joined(outputs)
        is_first, self._has_started = not self._has_started, True
        self._echo.note(output)
        is_hidden = self._request.max_tokens == 0
        fields: dict[str, Any] = {
            "index": self._index,
            "text": (self._echo.text if is_first else "") + ("" if is_hidden else output.text),
            "logprobs": self._chunk_logprobs(output, is_first=is_first),
            "finish_reason": self._finish_reason(output),
        }
        if output.finish_reason is not None:
            fields["stop_reason"] = None if is_hidden else output.stop_reason
            fields["matched_stop"] = None if is_hidden else matched_stop(outputs[-1])
        if self._request.return_token_ids:
            fields["token_ids"] = [] if is_hidden else list(output.token_ids)
            if is_first:
                fields["prompt_token_ids"] = list(self._echo.token_ids)
        prompt, num_best = output.prompt_logprobs, self._request.prompt_logprobs
        if prompt is not None and self._names is not None and num_best is not None:
            fields["prompt_logprobs"] = prompt_logprobs(prompt.best(num_best), self._names)
        return fields

    def _chunk_logprobs(self, output: EngineOutput, *, is_first: bool) -> CompletionLogprobs | None:
        if self.logprobs is None or self._request.logprobs is None:
            return None
        parts: list[CompletionLogprobs] = []
        if is_first and self._request.echo:
            parts += self._echoed_logprobs(self.logprobs, self._request.logprobs)
        if output.logprobs is not None and self._request.max_tokens != 0:
            parts.append(self.logprobs.write(output.logprobs))
        return concatenate(parts)

    def _echoed_logprobs(
        self, writer: CompletionLogprobsWriter, num_best: int
    ) -> list[CompletionLogprobs]:
        first, rest = writer.skip(self._echo.token_ids[:1]), self._echo.logprobs
        return [first] if rest is None else [first, writer.write(rest.best(num_best))]

    def _finish_reason(self, output: EngineOutput) -> Literal["stop", "length"] | None:
        if output.finish_reason is None:
            return None
        is_stop = output.finish_reason is FinishReason.STOP and self._request.max_tokens != 0
        return "stop" if is_stop else "length"


def completion_params(request: CompletionRequest) -> SamplingParams:
    """Build the engine's sampling parameters. Raise InvalidValueError."""
    form = request.response_format.to_structure() if request.response_format else None
    echoed = request.logprobs if request.echo else None
    requested = [each for each in (echoed, request.prompt_logprobs) if each is not None]
    return sampling_params(
        request,
        max_tokens=DEFAULT_MAX_TOKENS if request.max_tokens is None else max(1, request.max_tokens),
        logprobs=0 if request.logprob_token_ids else request.logprobs,
        prompt_logprobs=max(requested, default=None),
        structured_output=requested_structure(request, form),
    )


async def _echo(
    router: Router, request: CompletionRequest, given: str | list[int], token_ids: tuple[int, ...]
) -> Echo:
    """Return the echo: a text as it was given, or that of the tokens, decoded as the answer is."""
    if not request.echo:
        return Echo(token_ids)
    is_given = isinstance(given, str) and request.truncate_prompt_tokens is None
    if is_given and request.logprobs is None:
        return Echo(token_ids, str(given))
    skips = not is_given and request.skip_special_tokens is not False
    text, lengths = await router.text.token_texts(token_ids, skip_special_tokens=skips)
    if not is_given:
        return Echo(token_ids, text, lengths)
    # A given text has no tokens that the tokenizer puts before it. Normalization may change the
    # number of its characters: the difference is that of the last token.
    added = await router.text.encode("", add_special_tokens=request.add_special_tokens)
    num_added = sum(takewhile(bool, map(eq, added, token_ids)))
    start, size = sum(lengths[:num_added]), len(str(given))
    ends = [min(max(0, each - start), size) for each in accumulate(lengths[:-1])]
    return Echo(token_ids, str(given), [end - begin for begin, end in pairwise([0, *ends, size])])


def _prompts(request: CompletionRequest) -> list[str | list[int]]:
    """Return the prompts, each a text or token ids. Raise InvalidValueError."""
    prompts = request.prompts
    require_count("prompt", len(prompts), 1, MAX_PROMPTS, "prompts")
    for index, each in enumerate(prompts):
        name = "prompt" if each is request.prompt else f"prompt[{index}]"
        if isinstance(each, str):
            require_count(name, len(each), 1, MAX_TEXT_CHARS, "characters")
        else:
            require_count(name, len(each), 1, MAX_TOKEN_IDS, "tokens")
    return prompts


def _several(prompts: Sequence[object]) -> str:
    """Return the number of prompts in words, if there are several."""
    return f"{len(prompts)} prompts" if len(prompts) > 1 else ""


def _check_num_logprobs(
    request: CompletionRequest,
    params: SamplingParams,
    echoes: Sequence[Echo],
    max_tokens: int,
) -> None:
    """Limit the log-probabilities of one response: of all prompts, choices and echoes together.

    max_tokens: most tokens of a choice. A stream sends those of the answer in parts, uncounted.
    """
    if params.logprobs is None and request.prompt_logprobs is None:
        return
    num_prompt_tokens = sum(len(each.token_ids) for each in echoes)
    num_positions = params.n * num_prompt_tokens if request.echo else 0
    if not (request.stream or request.max_tokens == 0):
        num_positions += len(echoes) * params.n * max_tokens
    num_in_choices = params.num_listed * num_positions
    per_prompt_token = 0 if request.prompt_logprobs is None else 1 + request.prompt_logprobs
    num_logprobs = num_in_choices + per_prompt_token * num_prompt_tokens
    if num_logprobs > MAX_ANSWER_LOGPROBS:
        limit = f"lower: prompts, choices and echoes may have {MAX_ANSWER_LOGPROBS} in all"
        limit += f" (got up to {num_logprobs}, with the tokens' own)"
        name = "logprobs" if num_in_choices else "prompt_logprobs"
        raise InvalidValueError(name, getattr(request, name), limit)
