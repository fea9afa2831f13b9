"""`/v1/chat/completions`: plans a chat, and returns or streams its answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from cluster.api.openai.chat_choice import ChoiceWriter
from cluster.api.openai.chat_schema import ChatChunk, ChatChunkChoice, ChatCompletion, ChatRequest
from cluster.api.openai.conversation import render_tools_as_text, turns
from cluster.api.openai.logprobs import TokenNames, prompt_logprobs
from cluster.api.openai.offload import has_many_logprobs, offload
from cluster.api.openai.request_builder import (
    RequestContext,
    ResponseInfo,
    generate_call,
    prompt_token_ids,
    token_names,
    with_seed,
)
from cluster.api.openai.sampling_fields import requested_structure, sampling_params
from cluster.api.openai.streams import DONE, PromptOutput, generate_outputs
from cluster.api.openai.tool_format import TOOL_FORMATS, ToolFormat, format_of_template
from cluster.api.openai.tool_use import ToolUse, tool_use
from cluster.api.openai.usage import UsageMeter
from cluster.api.sse import event
from cluster.config.serve_config import ServeConfig
from cluster.replica.requests import GenerateCall
from cluster.replica.router import Router
from specdec.text.chat_template import ChatTemplate, Conversation
from specdec.types.errors import InvalidValueError
from specdec.types.sampling_params import SamplingParams


@dataclass(frozen=True)
class ChatPlan:
    """A request with everything that is resolved before the first token.

    prompt: its token ids. tools: None without tools. names: None without log-probabilities.
    prefix: text before each answer (`echo`).
    """

    request: ChatRequest
    prompt: tuple[int, ...]
    call: GenerateCall
    info: ResponseInfo
    context: RequestContext
    tools: ToolUse | None
    names: TokenNames | None
    prefix: str

    @property
    def seed(self) -> int:
        """Seed of the request, given or chosen."""
        assert self.call.params.seed is not None, "plan_chat has set the seed"
        return self.call.params.seed


async def plan_chat(router: Router, request: ChatRequest, context: RequestContext) -> ChatPlan:
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
    return ChatPlan(
        request=request,
        prompt=prompt,
        call=generate_call(router, request, prompt, params, context.request_id),
        info=ResponseInfo(f"chatcmpl-{context.request_id}", router.config.served_model_name),
        context=context,
        tools=tools,
        names=await token_names(router, request) if needs_names else None,
        prefix=_prefix(request),
    )


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


async def complete_chat(router: Router, plan: ChatPlan) -> ChatCompletion:
    """Run a planned chat and return the complete answer."""
    writers, meter = _writers(plan), UsageMeter()
    first: PromptOutput | None = None
    async with aclosing(generate_outputs(router, [plan.call], plan.context.deadline)) as outputs:
        async for each in outputs:
            meter.add(0, each.output)
            writers[each.output.choice].add(each.output)
            first = first or each
    assert first is not None, "a request has at least one output"
    build = partial(_completion, plan, writers, meter, first)
    return await offload(build, is_large=plan.names is not None)


def _completion(
    plan: ChatPlan, writers: Iterable[ChoiceWriter], meter: UsageMeter, first: PromptOutput
) -> ChatCompletion:
    completion = ChatCompletion(
        id=plan.info.id,
        object="chat.completion",
        created=plan.info.created,
        model=plan.info.model,
        seed=plan.seed,
        choices=[writer.choice() for writer in writers],
        usage=meter.usage(),
    )
    _add_prompt_fields(plan, first, completion)
    return completion


async def stream_chat(
    plan: ChatPlan, outputs: AsyncGenerator[PromptOutput, None]
) -> AsyncGenerator[bytes, None]:
    """Yield the events of an answer: the roles, a delta for each output, and the usage."""
    writers, meter = _writers(plan), UsageMeter()
    async for each in outputs:
        encode = partial(_events, plan, writers, meter, each)
        for data in await offload(encode, is_large=has_many_logprobs(each.output, plan.names)):
            yield data
    if plan.request.includes_usage:
        chunk = _chunk(plan, choices=[])
        chunk.usage = meter.usage()
        yield event(chunk.to_json())
    yield DONE


def _events(
    plan: ChatPlan, writers: Sequence[ChoiceWriter], meter: UsageMeter, prompt_output: PromptOutput
) -> list[bytes]:
    """Encode an output as at most two events; none if it adds no visible text."""
    events, output = list[bytes](), prompt_output.output
    if not meter.has_output:
        events.append(event(_opening(plan, writers, prompt_output).to_json()))
    meter.add(0, output)
    choice = writers[output.choice].chunk(output)
    if choice is not None:
        chunk = _chunk(plan, choices=[choice])
        if plan.request.has_continuous_usage:
            chunk.usage = meter.usage()
        events.append(event(chunk.to_json()))
    return events


def _opening(plan: ChatPlan, writers: Iterable[ChoiceWriter], first: PromptOutput) -> ChatChunk:
    chunk = _chunk(plan, choices=[writer.opening() for writer in writers])
    _add_prompt_fields(plan, first, chunk)
    return chunk


def _chunk(plan: ChatPlan, choices: list[ChatChunkChoice]) -> ChatChunk:
    chunk = ChatChunk(
        id=plan.info.id,
        object="chat.completion.chunk",
        created=plan.info.created,
        model=plan.info.model,
        seed=plan.seed,
        choices=choices,
    )
    if plan.request.includes_usage:
        chunk.usage = None  # set, and thus serialized as null
    return chunk


def _writers(plan: ChatPlan) -> list[ChoiceWriter]:
    request = plan.request
    names = plan.names if request.logprobs else None
    return [
        ChoiceWriter(
            index,
            parser=plan.tools.parser() if plan.tools else None,
            names=names,
            returns_token_ids=request.return_token_ids,
            prefix=plan.prefix,
        )
        for index in range(plan.call.params.n)
    ]


def _add_prompt_fields(
    plan: ChatPlan, first: PromptOutput, answer: ChatCompletion | ChatChunk
) -> None:
    """Set the requested fields of the prompt; a field that is not set is not serialized."""
    logprobs = first.output.prompt_logprobs
    if logprobs is not None and plan.names is not None:
        answer.prompt_logprobs = prompt_logprobs(logprobs, plan.names)
    if plan.request.return_token_ids:
        answer.prompt_token_ids = list(plan.prompt)


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
