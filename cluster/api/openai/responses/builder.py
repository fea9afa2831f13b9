"""`/v1/responses`: a chat in OpenAI's newer format, without stored state."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import accumulate, count, pairwise
from typing import Any, Literal

from cluster.api.base.openai_errors import Failure
from cluster.api.base.openai_schema import Usage
from cluster.api.base.sse import event
from cluster.api.openai.answer_reading import AnswerReader
from cluster.api.openai.builders import RequestContext, ResponseBuilder
from cluster.api.openai.chat import ChatBuilder, prepare_chat
from cluster.api.openai.logprobs import chat_logprobs
from cluster.api.openai.responses.input import as_chat
from cluster.api.openai.responses.output import Change, OutputItems, TextLogprob
from cluster.api.openai.responses.tools import offered_tools
from cluster.api.openai.responses.truncation import fitting
from cluster.api.openai.schemas.chat_schema import ChatRequest
from cluster.api.openai.schemas.response_items import HostedTool, PlacedTool
from cluster.api.openai.schemas.responses_schema import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseBody,
    ResponseError,
    ResponsesRequest,
    ResponseUsage,
)
from cluster.api.openai.streams import PromptOutput
from cluster.replica.router import Router
from specdec.types.errors import InvalidValueError
from specdec.types.responses import EngineOutput, FinishReason


async def prepare_response(
    router: Router, request: ResponsesRequest, context: RequestContext
) -> ResponsesBuilder:
    """Validate and tokenize a request. Raise the errors of its fields."""
    if request.top_logprobs and not request.has_logprobs:
        limit = "left out unless include contains message.output_text.logprobs"
        raise InvalidValueError("top_logprobs", request.top_logprobs, limit)
    tools = offered_tools(request)
    chat = response_chat(router, request)
    builder = await prepare_chat(router, chat, context)
    if request.truncation == "auto":
        builder = await fitting(router, chat, builder, context)
    return ResponsesBuilder(request, builder, tools, context.request_id)


def response_chat(router: Router, request: ResponsesRequest) -> ChatRequest:
    """Return the equivalent chat. Raise the errors of its fields and of the admission."""
    router.check_admission(request.model or "", 1)  # before the template: it waits for loading
    return as_chat(request, offered_tools(request))


class ResponsesBuilder(ResponseBuilder):
    """Builder of the response to a request of `/v1/responses`."""

    def __init__(
        self,
        request: ResponsesRequest,
        chat: ChatBuilder,
        tools: Sequence[PlacedTool],
        request_id: str,
    ) -> None:
        """Make a builder. chat: the equivalent chat. tools: those that it offers."""
        super().__init__(chat.calls, chat.names)
        self._request = request
        self._info = chat.info
        self._id = f"resp_{request_id}"
        self._numbers = count()  # of the events
        self._finish_reason: FinishReason | None = None
        self._reader = AnswerReader(chat.reading)
        self.forced_calls = chat.forced_calls
        self._output = OutputItems(request_id, tools, has_summary=request.has_summary)
        self._error: ResponseError | None = None

    def add(self, each: PromptOutput) -> None:
        """Add an output to the complete response."""
        for _ in self._changes(each):
            pass

    def body(self) -> ResponseBody:
        """Build the response so far."""
        request, status = self._request, self._status
        truncated = IncompleteDetails(reason="max_output_tokens")
        return ResponseBody(
            id=self._id,
            object="response",
            created_at=self._info.created,
            status=status,
            model=self._info.model,
            seed=self._info.seed,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            metadata=request.metadata or {},
            output=self._output.items,
            incomplete_details=truncated if status == "incomplete" else None,
            error=self._error,
            usage=_usage(self._used()) if self._finish_reason else None,
            **self._tool_fields(),
            store=False,
        )

    def opening(self) -> list[bytes]:
        """Encode the events before the first output."""
        return [self._body_event("created"), self._body_event("in_progress")]

    def events(self, each: PromptOutput) -> list[bytes]:
        """Encode an output as the events of its items; the last one ends them."""
        return [self._event(kind, fields) for kind, fields in self._changes(each)]

    def closing(self) -> list[bytes]:
        """Encode the end of the response."""
        return [self._body_event(self._status)]

    def failed(self, failure: Failure) -> list[bytes]:
        """Encode an error as the last event."""
        details = failure.details
        self._error = ResponseError(code=details.code or details.type, message=details.message)
        self._output.interrupt()
        return [self._body_event("failed")]

    def _changes(self, each: PromptOutput) -> Iterator[Change]:
        """Add an output and yield the changes of the items."""
        output = each.output
        self.meter.add(0, output)
        self._finish_reason = output.finish_reason
        for part in self._parts(output):
            yield from self._output.add(self._reader.read(part), self._logprobs(part))
        if output.finish_reason is not None:
            is_cut = output.finish_reason is FinishReason.LENGTH
            if self._output.ends_with_call:
                is_cut = not self._reader.has_whole_calls
            yield from self._output.finish(is_complete=not is_cut)

    def _parts(self, output: EngineOutput) -> Iterator[EngineOutput]:
        """Split an output into its tokens where these have log-probabilities, else yield it whole.

        So the log-probabilities of a token get to the item that its text is of.
        """
        lengths = output.text_lengths
        if output.logprobs is None or not lengths:
            yield output
            return
        last = len(lengths) - 1
        for index, (start, end) in enumerate(pairwise(accumulate(lengths, initial=0))):
            token = slice(index, index + 1)
            yield output._replace(
                token_ids=output.token_ids[token],
                text=output.text[start:end],
                text_lengths=lengths[token],
                logprobs=output.logprobs[token],
                finish_reason=output.finish_reason if index == last else None,
            )

    def _logprobs(self, token: EngineOutput) -> list[TextLogprob]:
        """Return the log-probability of one of the `_parts`, [] if not requested."""
        if token.logprobs is None or self.names is None:
            return []
        found = chat_logprobs(token.logprobs, self.names).content
        return [(each, token.text) for each in found]

    def _tool_fields(self) -> dict[str, Any]:
        """Return the fields of the request about tools, without the hosted ones."""
        request, choice = self._request, self._request.tool_choice or "auto"
        offered = [each for each in request.tools or () if not isinstance(each, HostedTool)]
        named = choice if isinstance(choice, str) else choice.model_dump(exclude_unset=True)
        return {
            "tools": [each.model_dump(exclude_unset=True) for each in offered],
            "tool_choice": named,
            "parallel_tool_calls": request.parallel_tool_calls,
        }

    def _used(self) -> Usage:
        count = self._reader.num_reasoning_tokens
        return Usage(**self.meter.usage(num_reasoning_tokens=count))

    @property
    def _status(self) -> Literal["in_progress", "completed", "incomplete", "failed"]:
        if self._error is not None:
            return "failed"
        match self._finish_reason:
            case None:
                return "in_progress"
            case FinishReason.LENGTH:
                return "incomplete"
            case FinishReason.STOP:
                return "completed"

    def _body_event(self, kind: str) -> bytes:
        return self._event(kind, {"response": self.body().to_dict()})

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        kind = f"response.{kind}"
        data = {"type": kind, "sequence_number": next(self._numbers), **fields}
        return event(json.dumps(data), kind)


def _usage(usage: Usage) -> ResponseUsage:
    cached, details = usage.prompt_tokens_details.cached_tokens, usage.completion_tokens_details
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=cached, cache_write_tokens=0),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=details.reasoning_tokens),
        total_tokens=usage.total_tokens,
        speculation=details.speculation,
    )
