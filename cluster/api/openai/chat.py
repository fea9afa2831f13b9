"""`/v1/chat/completions`: prepares a chat and builds its response."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from cluster.api.base.openai_schema import FinishReason
from cluster.api.openai.answer_reading import AnswerReader, AnswerReading, answer_reading
from cluster.api.openai.builders import (
    ChoicesBuilder,
    ChoiceWriter,
    RequestContext,
    ResponseInfo,
    TextDelta,
    generate_call,
    matched_stop,
    prompt_token_ids,
    token_names,
    with_seed,
)
from cluster.api.openai.conversation import (
    ToolUse,
    configured_tool_format,
    make_conversation,
    tool_use,
    turns,
)
from cluster.api.openai.forced_calls import OUTPUT_INTERVAL
from cluster.api.openai.logprobs import (
    ChoiceLogprobs,
    TokenNames,
    chat_logprobs,
    prompt_logprobs,
)
from cluster.api.openai.parsers.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from cluster.api.openai.parsers.tool_format import ToolFormat
from cluster.api.openai.request_warnings import RequestWarning, template_warnings
from cluster.api.openai.schemas.chat_schema import ChatRequest
from cluster.api.openai.schemas.sampling_fields import (
    requested_structure,
    sampling_params,
    speculation_options,
)
from cluster.api.openai.streams import PromptOutput
from cluster.replica.router import Router
from specdec.text.detokenizer import IncrementalDetokenizer
from specdec.types import responses
from specdec.types.errors import InvalidValueError
from specdec.types.request import GenerateRequest, ThinkingBudget
from specdec.types.responses import EngineOutput
from specdec.types.sampling.sampling_params import SamplingParams

_NO_PROMPT_FIELDS = {"prompt_logprobs": None, "prompt_token_ids": None}


async def prepare_chat(
    router: Router, request: ChatRequest, context: RequestContext
) -> ChatBuilder:
    """Validate and tokenize a request. Raise the errors of its fields."""
    request.check_together()
    router.check_admission(request.model or "", 1)  # before the template: it waits for loading
    template = router.text.chat_template
    form = configured_tool_format(router.config, template)
    reading = _reading(router, request, form)
    tools = reading.tools
    params = chat_params(request, reading)
    _check_resumption(request, params, tools)
    params = with_seed(params, router)
    if params.n > 1:
        router.check_admission(request.model or "", params.n)
    conversation = make_conversation(request, tools, template, form)
    context.warnings.extend(template_warnings(conversation, template))
    context.warnings.extend(tools.warnings if tools else ())
    chat = await router.text.encode_chat(conversation, reading.marks)
    prompt = await prompt_token_ids(router, request, chat.token_ids)
    if chat.answer_start:
        reading = replace(reading, prefix=chat.answer_start)
    params = reading.constrained(params)
    needs_names = request.logprobs or request.prompt_logprobs is not None
    call = generate_call(router, request, prompt, params, context.request_id)
    if budget := await _thinking_budget(router, request, reading, context):
        call = replace(call, thinking_budget=budget)
    ends_at_repeat = _ends_at_repeat(request, tools)
    if ends_at_repeat and not request.stream:
        call = replace(call, stream_interval=OUTPUT_INTERVAL)
    info = ResponseInfo.of(f"chatcmpl-{context.request_id}", router, params, request.model)
    names = token_names(router, request) if needs_names else None
    builder = ChatBuilder(request, call, info, reading, names)
    builder.forced_calls = reading if ends_at_repeat else None
    if request.resume_token_ids and not reading.is_plain:
        detokenizer = IncrementalDetokenizer.of(router.text.tokenizer, params, prompt)
        received = await router.text.received(detokenizer, request.resume_token_ids)
        builder.writers[0].reader.resume(received)
    return builder


def _reading(router: Router, request: ChatRequest, form: ToolFormat) -> AnswerReading:
    """Resolve the tools of a request, and how its answers are read. Raise InvalidValueError."""
    parser, is_special = router.config.reasoning_parser, router.text.is_special
    tools = tool_use(request, form, is_special)
    return answer_reading(request, tools, form, parser, is_special)


def _check_resumption(request: ChatRequest, params: SamplingParams, tools: ToolUse | None) -> None:
    """Raise InvalidValueError for resume_token_ids with what cannot be resumed."""
    request.check_resumption(params, echo=request.echo)
    if request.resume_token_ids and tools is not None:
        limit = "left out where resume_token_ids are given: a call is sent from its beginning"
        raise InvalidValueError("tools", len(tools.tools), limit)


def _ends_at_repeat(request: ChatRequest, tools: ToolUse | None) -> bool:
    """Return whether an answer ends at a repeated call. Raise InvalidValueError."""
    if tools is None or not tools.ends_at_repeat:
        return False
    if request.receipt:
        raise InvalidValueError("receipt", True, "false where tool calls end at a repeated one")
    return True


async def _thinking_budget(
    router: Router, request: ChatRequest, reading: AnswerReading, context: RequestContext
) -> ThinkingBudget | None:
    """Return the budget of a request, None without one or, with a warning, where it has no effect.

    Raise InvalidValueError.
    """
    count, syntax = request.thinking_token_budget, reading.syntax
    if count is None:
        return None
    if reading.is_constrained and syntax is None:
        text = "ignored: the answer has no place for reasoning"
        context.warnings.append(RequestWarning("thinking_token_budget", text))
        return None
    if syntax is None:
        limit = "left out unless the service has a reasoning parser with marks, such as qwen3"
        raise InvalidValueError("thinking_token_budget", count, limit)
    refused = {
        "n": (request.n or 1) > 1,
        "logprobs": request.logprobs,
        "receipt": request.receipt,
        "resume_token_ids": request.resume_token_ids,
    }
    for name, value in refused.items():
        if value:
            limit = f"left out where {name} is given"
            raise InvalidValueError("thinking_token_budget", count, limit)
    closing = f"\n{syntax.closings[0]}\n\n"
    token_ids = await router.text.encode(closing, add_special_tokens=False)
    return ThinkingBudget(count, token_ids, syntax.is_open)


class ChatBuilder(ChoicesBuilder["ChatWriter"]):
    """Builder of the response to a chat."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        request: ChatRequest,
        call: GenerateRequest,
        info: ResponseInfo,
        reading: AnswerReading,
        names: TokenNames | None,
    ) -> None:
        """Make a builder. reading: how answers are parsed."""
        self.reading = reading
        choices = range(call.params.n)
        writers = [ChatWriter(index, request, reading, names) for index in choices]
        super().__init__(request, [call], info, names, writers)
        self._first: EngineOutput | None = None

    def usage(self) -> dict[str, Any]:
        """Return the usage so far."""
        counts = (writer.reader.num_reasoning_tokens for writer in self.writers)
        return self.meter.usage(num_reasoning_tokens=sum(counts))

    def add(self, each: PromptOutput) -> None:
        """Add an output to the complete response."""
        super().add(each)
        self._first = self._first or each.output

    @property
    def prompt_fields(self) -> dict[str, Any]:
        """The fields of the prompt in the complete response."""
        assert self._first is not None, "a request has at least one output"
        return {**_NO_PROMPT_FIELDS, **self._prompt_fields(self._first)}

    def events(self, each: PromptOutput) -> list[bytes]:
        """Encode an output; the first one after an event with the role for each choice."""
        is_first, encoded = not self.meter.has_output, super().events(each)
        return [*self._openings(each.output), *encoded] if is_first else encoded

    def _openings(self, first: EngineOutput) -> list[bytes]:
        """Encode the roles, which have no tokens; the first event has the fields of the prompt."""
        usage = None
        if self.has_continuous_usage:
            usage = self.meter.usage(num_hidden_tokens=self.meter.num_output_tokens)
        fields = self._prompt_fields(first)
        openings = [writer.opening() for writer in self.writers]
        return [
            self.encode_chunk(openings[:1], usage, **fields),
            *(self.encode_chunk([each], usage) for each in openings[1:]),
        ]

    def _prompt_fields(self, first: EngineOutput) -> dict[str, Any]:
        """Return the requested fields of the prompt; a field that is not set is not serialized."""
        fields: dict[str, Any] = {}
        if first.prompt_logprobs is not None and self.names is not None:
            fields["prompt_logprobs"] = prompt_logprobs(first.prompt_logprobs, self.names)
        if self.request.return_token_ids:
            fields["prompt_token_ids"] = self.calls[0].prompt
        return fields


class ChatWriter(ChoiceWriter):
    """Builder of one choice: text, reasoning, tool calls and log-probabilities."""

    def __init__(
        self, index: int, request: ChatRequest, reading: AnswerReading, names: TokenNames | None
    ) -> None:
        """Make a builder; `reading` makes the parser."""
        super().__init__()
        self._index = index
        self.reader = AnswerReader(reading)
        self._names = names if request.logprobs else None
        self._returns_token_ids = request.return_token_ids
        self._is_plain = self._names is None and not request.return_token_ids
        self._prefix = _prefix(request)

    def opening(self) -> dict[str, Any]:
        """Return the choice in the first chunk of a stream, which has the role and no text."""
        return self._choice("delta", {"role": "assistant", "content": self._prefix})

    def delta(self, output: EngineOutput) -> dict[str, Any] | TextDelta | None:
        """Convert an output to a chunk's choice; return None if it adds nothing visible."""
        pieces = self.reader.read(output)
        if self._is_plain and output.finish_reason is None:
            match pieces:
                case []:
                    return None
                case [Content() | Reasoning() as text]:
                    return text
        return self._chunk(output, pieces)

    def text_chunk(self, delta: TextDelta) -> dict[str, Any]:
        """Return the choice in a chunk that adds only a text."""
        return self._choice("delta", self._delta([delta]))

    def _chunk(self, output: EngineOutput, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        logprobs = self._logprobs([output])
        if not (pieces or logprobs or output.finish_reason or self._returns_token_ids):
            return None
        reason = self._finish_reason(output)
        choice = self._choice("delta", self._delta(pieces), logprobs, reason)
        if reason is not None:
            choice["stop_reason"] = output.stop_reason
            choice["matched_stop"] = matched_stop(output)
        if self._returns_token_ids:
            choice["token_ids"] = output.token_ids
        return choice

    def choice(self) -> dict[str, Any]:
        """Return the fields of the complete choice, from the outputs that were added."""
        pieces = [piece for output in self.outputs for piece in self.reader.read(output)]
        last = self.outputs[-1]
        reason = self._finish_reason(last)
        assert reason is not None, "the last output has a finish reason"
        return {
            **self._choice("message", self._message(pieces), self._logprobs(self.outputs), reason),
            "stop_reason": last.stop_reason,
            "matched_stop": matched_stop(last),
            "token_ids": self._token_ids(),
        }

    def _choice(
        self,
        name: str,
        message: dict[str, Any],
        logprobs: ChoiceLogprobs | None = None,
        reason: FinishReason | None = None,
    ) -> dict[str, Any]:
        """Return the fields that all choices have. name: of the field with the message."""
        fields = {"index": self._index, name: message}
        return {**fields, "logprobs": logprobs, "finish_reason": reason}

    def _token_ids(self) -> list[int] | None:
        if not self._returns_token_ids:
            return None
        return [each for output in self.outputs for each in output.token_ids]

    def _message(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        """Return the fields of the message."""
        delta = self._delta(pieces)
        text, calls = self._prefix + delta.get("content", ""), delta.get("tool_calls", ())
        content = text if text or not calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if "reasoning" in delta:
            message["reasoning_content"] = message["reasoning"] = delta["reasoning"]
        if calls:
            for each in calls:
                del each["index"]
            message["tool_calls"] = calls
        return message

    def _logprobs(self, outputs: Iterable[EngineOutput]) -> ChoiceLogprobs | None:
        if self._names is None:
            return None
        parts = [each.logprobs for each in outputs if each.logprobs is not None]
        content = [each for part in parts for each in chat_logprobs(part, self._names).content]
        return ChoiceLogprobs(content=content, refusal=None)

    def _finish_reason(self, output: EngineOutput) -> FinishReason | None:
        if output.finish_reason is None:
            return None
        if output.finish_reason is responses.FinishReason.LENGTH:
            return "length"
        return "tool_calls" if self.reader.has_whole_calls else "stop"

    def _delta(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        """Merge the pieces of one output; only the first piece of a call has its id and name."""
        texts: dict[type[TextDelta], str] = {}
        calls: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            match piece:
                case Content() | Reasoning():
                    texts[type(piece)] = texts.get(type(piece), "") + piece.text
                case CallStart():
                    function = {"name": piece.name, "arguments": ""}
                    start = {"index": piece.index, "id": piece.call_id, "type": "function"}
                    calls[piece.index] = {**start, "function": function}
                case CallArguments():
                    more = {"index": piece.index, "function": {"arguments": ""}}
                    call = calls.setdefault(piece.index, more)
                    call["function"]["arguments"] += piece.text
        delta: dict[str, Any] = {}
        if Content in texts:
            delta["content"] = texts[Content]
        if Reasoning in texts:
            delta["reasoning_content"] = delta["reasoning"] = texts[Reasoning]
        if calls:
            delta["tool_calls"] = [*calls.values()]
        return delta


def chat_params(request: ChatRequest, reading: AnswerReading) -> SamplingParams:
    """Build the engine's sampling parameters. Raise InvalidValueError."""
    form = request.response_format.to_structure() if request.response_format else None
    calls = reading.tools.structure if reading.tools else None
    if calls is not None:
        form = None  # the grammar of optional calls contains it, and forced ones are no answer
    max_tokens = request.max_completion_tokens
    options = None
    if request.prediction is not None:
        options = replace(speculation_options(request), prediction=request.prediction.text)
    return sampling_params(
        request,
        max_tokens=request.max_tokens if max_tokens is None else max_tokens,
        logprobs=request.num_best,
        structured_output=requested_structure(request, form, calls),
        skip_special_tokens=False if reading.shows_special_tokens else None,
        speculation=options,
    )


def _prefix(request: ChatRequest) -> str:
    last = request.messages[-1]
    if not request.echo or last.role != "assistant":
        return ""
    return str(turns([last])[0]["content"])
