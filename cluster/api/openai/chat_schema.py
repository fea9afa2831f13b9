"""The bodies of `/v1/chat/completions`, in both directions."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field

from cluster.api.openai.logprobs import ChoiceLogprobs, PromptLogprobs
from cluster.api.openai.sampling_fields import SamplingFields
from cluster.api.openai.schema import (
    AnswerModel,
    FinishReason,
    Metadata,
    RequestModel,
    Usage,
    at_most,
    number,
    option,
)
from cluster.api.openai.structure import ResponseFormat
from cluster.replica.limits import MAX_CHAT_MESSAGES

_ROLES = Literal["system", "developer", "user", "assistant", "tool"]
MAX_PARTS = 1_000
"""Of one message."""
MAX_TOOLS = 128

_TEXT_ONLY = "left out: the models read and write text only"


class ContentPart(RequestModel):
    """A piece of a message's text; the models read nothing else."""

    type: Literal["text", "refusal"]
    text: str | None = option("with type `text`")
    refusal: str | None = option("with type `refusal`")


class CalledFunction(RequestModel):
    """A function as an earlier answer called it."""

    name: str
    arguments: str = Field(description="JSON, as the answer had it")


class ToolCall(RequestModel):
    """A call in an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(RequestModel):
    """One turn of the conversation. An assistant's may be an answer of this API as it came."""

    refused = MappingProxyType({"audio": _TEXT_ONLY, "function_call": "tool_calls"})

    role: _ROLES = Field(description="`developer` is `system`")
    content: str | Annotated[list[ContentPart], at_most(MAX_PARTS)] | None = option(
        "the text; parts, at most 1000, are put on lines of their own"
    )
    name: str | None = option("accepted; not shown to the model")
    tool_calls: Annotated[list[ToolCall], at_most(MAX_TOOLS)] | None = option(
        "of an assistant's message; at most 128"
    )
    tool_call_id: str | None = option("of a tool's message: the call that this is the result of")
    refusal: str | None = option("accepted; not shown to the model")
    reasoning_content: str | None = option("for templates that show it to the model")
    annotations: Annotated[list[Any], at_most(MAX_PARTS)] | None = option(
        "accepted; not shown to the model"
    )


class FunctionDefinition(RequestModel):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$", description="at most 64 characters")
    description: str | None = option("told to the model")
    parameters: dict[str, Any] | None = option("JSON schema of the arguments, an object")
    strict: bool | None = option("holds arguments to the schema where the model may choose to call")


class ToolDefinition(RequestModel):
    """A tool; there are no others than functions."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(RequestModel):
    """The name of a function among `tools`."""

    name: str


class NamedTool(RequestModel):
    """The function that has to be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(SamplingFields):
    """A conversation to go on with."""

    refused = MappingProxyType(
        {
            **SamplingFields.refused,
            "functions": "left out: give them as tools",
            "function_call": "left out: say it as tool_choice",
            "modalities": _TEXT_ONLY,
            "audio": _TEXT_ONLY,
            "prediction": "left out: say how to draft in speculation",
            "web_search_options": "left out: there is no search",
            "verbosity": "left out: say in a message how long the answer shall be",
            "documents": "left out: put them into a message",
            "chat_template": "left out: a request brings no program; the model's template is used",
            "add_special_tokens": "left out: the template brings them",
            "best_of": "left out: ask for n choices and choose",
        }
    )

    messages: Annotated[list[Message], at_most(MAX_CHAT_MESSAGES, 1)] = Field(
        description="the conversation, oldest first; at most 1000"
    )
    max_tokens: int | None = number("as max_completion_tokens, which is newer", 1)
    max_completion_tokens: int | None = number("most tokens of each choice; left out: what fits", 1)
    logprobs: bool = option("tells log-probabilities of the answer's tokens", False)
    top_logprobs: int | None = number("the likeliest tokens to tell of; with logprobs", 0, 20)
    response_format: ResponseFormat | None = option("what the whole text has to be")
    tools: Annotated[list[ToolDefinition], at_most(MAX_TOOLS)] | None = option(
        "functions that may be called; at most 128"
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = option(
        "whether to call: `auto` with tools, unless given; a named one has to be called"
    )
    parallel_tool_calls: bool = option("false allows one call in an answer", True)
    add_generation_prompt: bool | None = option("false leaves the assistant's turn unopened")
    continue_final_message: bool = option("goes on with the last message instead", False)
    echo: bool = option("puts the last message, if an assistant's, before the answer", False)
    chat_template_kwargs: dict[str, Any] | None = option(
        "variables that the model's template knows, such as `enable_thinking`"
    )
    reasoning_effort: str | None = option("for templates that know it")
    metadata: Metadata | None = option("accepted and not used; at most 16")
    store: bool | None = option("accepted; nothing is stored")
    service_tier: Literal["auto", "default"] | None = option("accepted; there is one tier")
    safety_identifier: str | None = option("accepted and not used")
    prompt_cache_key: str | None = option("accepted; the cache needs no hint")

    def sent_names(self) -> dict[str, str]:
        """Also which limit of tokens was given, and whether tools make the grammar."""
        names = {"structured_output.grammar": "tools"} if self.tools else {}
        if self.max_completion_tokens is None and self.max_tokens is not None:
            names["max_tokens"] = "max_tokens"
        if self.reasoning_effort is not None:
            names["chat_template_kwargs.reasoning_effort"] = "reasoning_effort"
        return names | super().sent_names()


class AnsweredFunction(AnswerModel):
    """A function that the model calls."""

    name: str
    arguments: str = Field(description="JSON")


class AnsweredToolCall(AnswerModel):
    """A call, to be answered with a message of role `tool`."""

    id: str
    type: Literal["function"]
    function: AnsweredFunction


class AnswerMessage(AnswerModel):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[AnsweredToolCall] = Field(default=[], description="where there are some")


class ChatChoice(AnswerModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None = Field(description="the stop string or token that ended it")
    token_ids: list[int] = Field(default=[], description="where asked for")


class ChatCompletion(AnswerModel):
    """The answer to a request that is not streamed."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    seed: int = Field(description="the request's, or the one that was chosen")
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = Field(default=None, description="where asked for")
    prompt_token_ids: list[int] = Field(default=[], description="where asked for")


class FunctionDelta(AnswerModel):
    """What is added to a call."""

    name: str | None = None
    arguments: str


class ToolCallDelta(AnswerModel):
    """A call that begins, with its id and name, or goes on."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class Delta(AnswerModel):
    """What is added to an answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] = Field(default_factory=list)


class ChatChunkChoice(AnswerModel):
    """What is added to one choice."""

    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] = Field(default_factory=list)


class ChatChunk(AnswerModel):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    seed: int
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] = Field(default_factory=list)
