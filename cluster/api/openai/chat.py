"""`/v1/chat/completions`: what a conversation is answered with, at once or as it comes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from cluster.api.openai.chat_choice import ChoiceWriter
from cluster.api.openai.chat_schema import ChatChunk, ChatChunkChoice, ChatCompletion, ChatRequest
from cluster.api.openai.conversation import told_in_words, turns
from cluster.api.openai.logprobs import TokenNames, prompt_logprobs
from cluster.api.openai.offload import off_loop, tells_many
from cluster.api.openai.request_builder import (
    Origin,
    Terms,
    generate_call,
    prompt_token_ids,
    settle_seed,
    token_names,
)
from cluster.api.openai.sampling_fields import form_of, sampling_params
from cluster.api.openai.streams import DONE, Said, answering, event
from cluster.api.openai.tool_format import TOOL_FORMATS, ToolFormat, format_of_template
from cluster.api.openai.tool_use import ToolUse, tool_use
from cluster.api.openai.usage import UsageMeter
from cluster.config.serve_config import ServeConfig
from cluster.replica.router import Router
from specdec.text.chat_template import ChatTemplate
from specdec.types.chat import Conversation
from specdec.types.errors import InvalidValueError
from specdec.types.request import GenerateRequest
from specdec.types.sampling_params import SamplingParams


@dataclass(frozen=True)
class ChatPlan:
    """A request with all that is decided before the first token.

    prompt: its tokens. tools: None where the model knows of none. names: None where no
        log-probabilities are told. prefix: what is put before each answer (`echo`).
    """

    request: ChatRequest
    prompt: tuple[int, ...]
    call: GenerateRequest
    origin: Origin
    terms: Terms
    tools: ToolUse | None
    names: TokenNames | None
    prefix: str

    @property
    def seed(self) -> int:
        """What fixes every random choice."""
        assert self.call.params.seed is not None, "the seed is settled when a chat is planned"
        return self.call.params.seed


async def plan_chat(router: Router, request: ChatRequest, terms: Terms) -> ChatPlan:
    """Decides everything. Raises what is wrong with the request."""
    request.check_together()
    _check_together(request)
    router.check_admission(request.model or "", 1)  # while it loads, reading templates would wait
    template = router.text.chat_template
    form = tool_form(router.config, template)
    tools = tool_use(request, form, router.text.is_special)
    params = settle_seed(chat_params(request, tools))
    router.check_admission(request.model or "", params.n)
    conversation = make_conversation(request, tools, template, form)
    prompt = await prompt_token_ids(router, request, conversation, add_special_tokens=False)
    needs_names = request.logprobs or request.prompt_logprobs is not None
    return ChatPlan(
        request=request,
        prompt=prompt,
        call=generate_call(router, request, prompt, params, terms.request_id),
        origin=Origin(f"chatcmpl-{terms.request_id}", router.config.served_model_name),
        terms=terms,
        tools=tools,
        names=await token_names(router, request) if needs_names else None,
        prefix=_prefix(request),
    )


def tool_form(config: ServeConfig, template: ChatTemplate) -> ToolFormat:
    """How the model writes calls: as configured, or as its template teaches."""
    parser = config.tool_call_parser
    return format_of_template(template.text) if parser == "auto" else TOOL_FORMATS[parser]


def chat_params(request: ChatRequest, tools: ToolUse | None) -> SamplingParams:
    """What the engine is asked. Raises InvalidValueError."""
    form = request.response_format.to_structure() if request.response_format else None
    calls = tools.structure if tools else None
    max_tokens = request.max_completion_tokens
    shows_marks = tools is not None and tools.shows_special_tokens
    return sampling_params(
        request,
        max_tokens=request.max_tokens if max_tokens is None else max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        structured_output=form_of(request, form, calls),
        skip_special_tokens=False if shows_marks else None,
    )


def make_conversation(
    request: ChatRequest, tools: ToolUse | None, template: ChatTemplate, form: ToolFormat
) -> Conversation:
    """What the template renders. Where it knows nothing of tools, a system message tells them."""
    messages = turns(request.messages)
    offered = tools.tools if tools else ()
    if not template.takes_tools:
        messages, offered = told_in_words(messages, offered, form), ()
    options = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        options["reasoning_effort"] = request.reasoning_effort
    opens_turn = request.add_generation_prompt
    return Conversation(
        messages=tuple(messages),
        tools=tuple(each.as_template_takes_it for each in offered),
        add_generation_prompt=not request.continue_final_message
        if opens_turn is None
        else opens_turn,
        continue_final_message=request.continue_final_message,
        template_kwargs=options,
    )


async def complete_chat(router: Router, plan: ChatPlan) -> ChatCompletion:
    """The whole answer."""
    writers, meter = _writers(plan), UsageMeter()
    first: Said | None = None
    async with aclosing(answering(router, [plan.call], plan.terms.deadline)) as said:
        async for each in said:
            meter.add(0, each.output)
            writers[each.output.choice].add(each.output)
            first = first or each
    assert first is not None, "an answer without an output"
    build = partial(_completion, plan, writers, meter, first)
    return await off_loop(build, is_large=plan.names is not None)


def _completion(
    plan: ChatPlan, writers: Iterable[ChoiceWriter], meter: UsageMeter, first: Said
) -> ChatCompletion:
    completion = ChatCompletion(
        id=plan.origin.id,
        object="chat.completion",
        created=plan.origin.created,
        model=plan.origin.model,
        seed=plan.seed,
        choices=[writer.choice() for writer in writers],
        usage=meter.usage(),
    )
    _tell_prompt(plan, first, completion)
    return completion


async def stream_chat(
    plan: ChatPlan, said: AsyncGenerator[Said, None]
) -> AsyncGenerator[bytes, None]:
    """The events of an answer: roles first, then what is added, and at last what it took."""
    writers, meter = _writers(plan), UsageMeter()
    async for each in said:
        tell = partial(_events, plan, writers, meter, each)
        for told in await off_loop(tell, is_large=tells_many(each.output, plan.names)):
            yield told
    if plan.request.tells_usage_at_end:
        chunk = _chunk(plan, choices=[])
        chunk.usage = meter.usage()
        yield _event(chunk)
    yield DONE


def _events(
    plan: ChatPlan, writers: Sequence[ChoiceWriter], meter: UsageMeter, said: Said
) -> list[bytes]:
    """What an output is told by: two events at most, none where nothing shows yet."""
    events = [] if meter.has_begun else [_event(_opening(plan, writers, said))]
    meter.add(0, said.output)
    choice = writers[said.output.choice].chunk(said.output)
    if choice is not None:
        chunk = _chunk(plan, choices=[choice])
        if plan.request.tells_usage_always:
            chunk.usage = meter.usage()
        events.append(_event(chunk))
    return events


def _opening(plan: ChatPlan, writers: Iterable[ChoiceWriter], first: Said) -> ChatChunk:
    chunk = _chunk(plan, choices=[writer.opening() for writer in writers])
    _tell_prompt(plan, first, chunk)
    return chunk


def _chunk(plan: ChatPlan, choices: list[ChatChunkChoice]) -> ChatChunk:
    chunk = ChatChunk(
        id=plan.origin.id,
        object="chat.completion.chunk",
        created=plan.origin.created,
        model=plan.origin.model,
        seed=plan.seed,
        choices=choices,
    )
    if plan.request.tells_usage_at_end:
        chunk.usage = None  # set, so that it is told
    return chunk


def _event(chunk: ChatChunk) -> bytes:
    return event(chunk.to_json())


def _writers(plan: ChatPlan) -> list[ChoiceWriter]:
    request = plan.request
    names = plan.names if request.logprobs else None
    return [
        ChoiceWriter(
            index,
            parser=plan.tools.parser() if plan.tools else None,
            names=names,
            tells_token_ids=request.return_token_ids,
            prefix=plan.prefix,
        )
        for index in range(plan.call.params.n)
    ]


def _tell_prompt(plan: ChatPlan, first: Said, answer: ChatCompletion | ChatChunk) -> None:
    """Sets what was asked for of the prompt; what is not set is not told."""
    told = first.output.prompt_logprobs
    if told is not None and plan.names is not None:
        answer.prompt_logprobs = prompt_logprobs(told, plan.names)
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
        limit = f"left out, or as much as max_tokens ({both[0]})"
        raise InvalidValueError("max_completion_tokens", both[1], limit)
