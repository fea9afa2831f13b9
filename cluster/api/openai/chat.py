"""`/v1/chat/completions`: prepares a chat and builds its response."""

from __future__ import annotations

from cluster.api.openai.chat_choice import ChoiceWriter
from cluster.api.openai.chat_schema import ChatChunk, ChatChunkChoice, ChatCompletion, ChatRequest
from cluster.api.openai.conversation import render_tools_as_text, turns
from cluster.api.openai.logprobs import TokenNames, prompt_logprobs
from cluster.api.openai.request_builder import (
    RequestContext,
    ResponseInfo,
    generate_call,
    prompt_token_ids,
    token_names,
    with_seed,
)
from cluster.api.openai.response_builder import ResponseBuilder
from cluster.api.openai.sampling_fields import requested_structure, sampling_params
from cluster.api.openai.streams import DONE, PromptOutput
from cluster.api.openai.tool_format import TOOL_FORMATS, ToolFormat, format_of_template
from cluster.api.openai.tool_use import ToolUse, tool_use
from cluster.api.sse import event
from cluster.config.serve_config import ServeConfig
from cluster.replica.router import Router
from specdec.text.chat_template import ChatTemplate
from specdec.types.chat import Conversation
from specdec.types.errors import InvalidValueError
from specdec.types.outputs import EngineOutput
from specdec.types.request import GenerateRequest
from specdec.types.sampling_params import SamplingParams


async def prepare_chat(
    router: Router, request: ChatRequest, context: RequestContext
) -> ChatBuilder:
    """Validate and tokenize a request. Raise the errors of its fields."""
    request.check_together()
    _check_together(request)
    router.check_admission(request.model or "", 1)  # before the template: it waits for loading
    template = router.text.chat_template
    form = configured_tool_format(router.config, template)
    tools = tool_use(request, form, router.text.is_special)
    params = with_seed(chat_params(request, tools))
    router.check_admission(request.model or "", params.n)
    conversation = make_conversation(request, tools, template, form)
    prompt = await prompt_token_ids(router, request, conversation, add_special_tokens=False)
    needs_names = request.logprobs or request.prompt_logprobs is not None
    return ChatBuilder(
        request=request,
        prompt=prompt,
        call=generate_call(router, request, prompt, params, context.request_id),
        info=ResponseInfo.of(f"chatcmpl-{context.request_id}", router, params),
        tools=tools,
        names=await token_names(router, request) if needs_names else None,
    )


class ChatBuilder(ResponseBuilder):
    """Builder of the response to a chat."""

    def __init__(
        self,
        request: ChatRequest,
        prompt: tuple[int, ...],
        call: GenerateRequest,
        info: ResponseInfo,
        tools: ToolUse | None,
        names: TokenNames | None,
    ) -> None:
        """Make a builder. prompt: its token ids. tools: None without tools."""
        super().__init__([call], names)
        self.info = info
        self._request = request
        self._prompt = prompt
        self._first: EngineOutput | None = None
        self._writers = [
            ChoiceWriter(
                index,
                parser=tools.parser() if tools else None,
                names=names if request.logprobs else None,
                returns_token_ids=request.return_token_ids,
                prefix=_prefix(request),
            )
            for index in range(call.params.n)
        ]

    def add(self, each: PromptOutput) -> None:
        """Add an output to the complete response."""
        self.meter.add(0, each.output)
        self._writers[each.output.choice].add(each.output)
        self._first = self._first or each.output

    def body(self) -> ChatCompletion:
        """Build the complete response."""
        completion = ChatCompletion(
            id=self.info.id,
            object="chat.completion",
            created=self.info.created,
            model=self.info.model,
            seed=self.info.seed,
            choices=[writer.choice() for writer in self._writers],
            usage=self.meter.usage(),
        )
        assert self._first is not None, "a request has at least one output"
        self._add_prompt_fields(self._first, completion)
        return completion

    def events(self, each: PromptOutput) -> list[bytes]:
        """Encode an output as at most two events: the first starts with the roles."""
        chunks, output = list[ChatChunk](), each.output
        if not self.meter.has_output:
            chunks.append(self._chunk([writer.opening() for writer in self._writers]))
            self._add_prompt_fields(output, chunks[0])
        self.meter.add(0, output)
        choice = self._writers[output.choice].chunk(output)
        if choice is not None:
            chunks.append(self._chunk([choice]))
            if self._request.has_continuous_usage:
                chunks[-1].usage = self.meter.usage()
        return [event(chunk.to_json()) for chunk in chunks]

    def closing(self) -> list[bytes]:
        """Encode the usage, if requested, and the end."""
        if not self._request.includes_usage:
            return [DONE]
        chunk = self._chunk([])
        chunk.usage = self.meter.usage()
        return [event(chunk.to_json()), DONE]

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        chunk = ChatChunk(
            id=self.info.id,
            object="chat.completion.chunk",
            created=self.info.created,
            model=self.info.model,
            seed=self.info.seed,
            choices=choices,
        )
        if self._request.includes_usage:
            chunk.usage = None  # set, and thus serialized as null
        return chunk

    def _add_prompt_fields(self, first: EngineOutput, answer: ChatCompletion | ChatChunk) -> None:
        """Set the requested fields of the prompt; a field that is not set is not serialized."""
        if first.prompt_logprobs is not None and self.names is not None:
            answer.prompt_logprobs = prompt_logprobs(first.prompt_logprobs, self.names)
        if self._request.return_token_ids:
            answer.prompt_token_ids = list(self._prompt)


def configured_tool_format(config: ServeConfig, template: ChatTemplate) -> ToolFormat:
    """Return the configured format of tool calls; `auto` derives it from the chat template."""
    parser = config.tool_call_parser
    return format_of_template(template.text) if parser == "auto" else TOOL_FORMATS[parser]


def chat_params(request: ChatRequest, tools: ToolUse | None) -> SamplingParams:
    """Build the engine's sampling parameters. Raise InvalidValueError."""
    form = request.response_format.to_structure() if request.response_format else None
    calls = tools.structure if tools else None
    max_tokens = request.max_completion_tokens
    shows_special_tokens = tools is not None and tools.shows_special_tokens
    return sampling_params(
        request,
        max_tokens=request.max_tokens if max_tokens is None else max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        structured_output=requested_structure(request, form, calls),
        skip_special_tokens=False if shows_special_tokens else None,
    )


def make_conversation(
    request: ChatRequest, tools: ToolUse | None, template: ChatTemplate, form: ToolFormat
) -> Conversation:
    """Build the input of the chat template; without tool support, tools become text."""
    messages = turns(request.messages)
    offered = tools.tools if tools else ()
    if not template.takes_tools:
        messages, offered = render_tools_as_text(messages, offered, form), ()
    options = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        options["reasoning_effort"] = request.reasoning_effort
    add_prompt = request.add_generation_prompt
    if add_prompt is None:
        add_prompt = not request.continue_final_message
    return Conversation(
        messages=tuple(messages),
        tools=tuple(each.template_definition for each in offered),
        add_generation_prompt=add_prompt,
        continue_final_message=request.continue_final_message,
        template_kwargs=options,
    )


def _prefix(request: ChatRequest) -> str:
    last = request.messages[-1]
    if not request.echo or last.role != "assistant":
        return ""
    return str(turns([last])[0]["content"])


def _check_together(request: ChatRequest) -> None:
    if request.top_logprobs is not None and not request.logprobs:
        limit = "left out unless logprobs is true"
        raise InvalidValueError("top_logprobs", request.top_logprobs, limit)
    both = (request.max_tokens, request.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        limit = f"left out, or equal to max_tokens ({both[0]})"
        raise InvalidValueError("max_completion_tokens", both[1], limit)
