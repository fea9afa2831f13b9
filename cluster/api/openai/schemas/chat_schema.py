"""Requests and responses of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from cluster.api.base.openai_schema import (
    FinishReason,
    GenerationBody,
    Metadata,
    RequestModel,
    ResponseModel,
    Usage,
    at_most,
    max_entries,
    number,
    option,
    text_type,
)
from cluster.api.openai.logprobs import ChoiceLogprobs, PromptLogprobs
from cluster.api.openai.schemas.sampling_fields import TOKEN_IDS, SamplingFields
from cluster.replica.limits import MAX_CHAT_MESSAGES, MAX_TOKEN_IDS
from specdec.types.errors import InvalidValueError
from specdec.types.validation import require_range

_ROLES = Literal["system", "developer", "user", "assistant", "tool"]
MAX_PARTS = 1_000
"""Limit for the content parts of one message."""
MAX_TOOLS = 128

CacheControl = dict[str, Any] | None
"""The mark of Anthropic's API for the end of a prefix to cache, which other clients send, too."""
CACHE_NOTE = "accepted; prefix caching needs no marks"
NOT_SHOWN = "not shown to the model"

ClientFields = dict[str, Any] | None
"""Fields that LiteLLM copies from an answer and returns with it."""

TEMPLATE_FIELDS = ("reasoning_effort", "verbosity")
"""Fields of a chat that are variables of its template; other APIs have them by other names."""

NO_MODERATION = "left out: the service moderates no texts"
TEXT_ONLY = "left out: the models read and write text only"


class ContentPart(RequestModel):
    """A part of a message's content; only text is supported.

    OpenAI's Agents SDK for JavaScript copies the fields of an answer to the part with its text.
    """

    type: Annotated[Literal["text", "refusal"], text_type("text", "refusal")]
    text: str | None = option("with type `text`")
    refusal: str | None = option("with type `refusal`")
    cache_control: CacheControl = option(CACHE_NOTE)
    prompt_cache_breakpoint: CacheControl = option(CACHE_NOTE)
    role: Literal["assistant"] | None = option(NOT_SHOWN)
    annotations: Annotated[list[Any], at_most(MAX_PARTS)] | None = option(NOT_SHOWN)
    reasoning_content: str | None = option(NOT_SHOWN)
    reasoning: str | None = option(NOT_SHOWN)
    tool_calls: Annotated[list[Any], at_most(MAX_TOOLS)] | None = option(NOT_SHOWN)


class CalledFunction(RequestModel):
    """A function call of an earlier answer, perhaps as OpenAI's client has parsed it."""

    name: str
    arguments: str = Field(description="JSON text of the earlier answer")
    parsed_arguments: Any = option(NOT_SHOWN)
    provider_specific_fields: ClientFields = option(NOT_SHOWN)


class ToolCall(RequestModel):
    """A tool call in an assistant message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = option("accepted: its place in the stream of the earlier answer")
    provider_specific_fields: ClientFields = option(NOT_SHOWN)


class Message(RequestModel):
    """One message of the chat. An answer of this API is accepted as it is.

    So are the fields that OpenAI's client (`parsed`), LiteLLM and lm-eval (`type`) add to messages.
    """

    refused: ClassVar[Mapping[str, str]] = {"audio": TEXT_ONLY, "function_call": "tool_calls"}

    role: _ROLES = Field(description="`developer` means `system`")
    content: str | Annotated[list[ContentPart], at_most(MAX_PARTS)] | None = option(
        "the text, or at most 1000 parts, joined by line breaks"
    )
    name: str | None = option("passed to the chat template")
    tool_calls: Annotated[list[ToolCall], at_most(MAX_TOOLS)] | None = option(
        "in an assistant message; at most 128"
    )
    tool_call_id: str | None = option("in a tool message: id of the call with this result")
    refusal: str | None = option(NOT_SHOWN)
    reasoning_content: str | None = option("passed to the chat template")
    reasoning: str | None = option("vLLM's name of reasoning_content")
    annotations: Annotated[list[Any], at_most(MAX_PARTS)] | None = option(NOT_SHOWN)
    type: str | None = option(NOT_SHOWN)
    parsed: Any = option(NOT_SHOWN)
    thinking_blocks: Annotated[list[Any], at_most(MAX_PARTS)] | None = option(NOT_SHOWN)
    reasoning_items: Annotated[list[Any], at_most(MAX_PARTS)] | None = option(NOT_SHOWN)
    provider_specific_fields: ClientFields = option(NOT_SHOWN)
    cache_control: CacheControl = option(CACHE_NOTE)


class FunctionDefinition(RequestModel):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$", description="at most 128 characters")
    description: str | None = option("shown to the model")
    parameters: dict[str, Any] | None = option("JSON schema of the arguments, an object")
    strict: bool | None = option("enforces the schema also with tool_choice `auto`")


class ToolDefinition(RequestModel):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition
    cache_control: CacheControl = option(CACHE_NOTE)


class NamedFunction(RequestModel):
    """The name of a function among `tools`."""

    name: str


class NamedTool(RequestModel):
    """The function that the model must call."""

    type: Literal["function"]
    function: NamedFunction


class AllowedFunctions(RequestModel):
    """The functions that the model may or must call, and the mode."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], at_most(MAX_TOOLS, 1)]


class AllowedTools(RequestModel):
    """The tools that the model may call; the others are not offered."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


class PredictedText(RequestModel):
    """A part of predicted output."""

    type: Literal["text"]
    text: str


class Prediction(RequestModel):
    """Predicted output: a text that the answer is expected to resemble."""

    type: Literal["content"] = Field(description="text is the only kind")
    content: str | Annotated[list[PredictedText], at_most(MAX_PARTS, 1)] = Field(
        description="the text, or at most 1000 parts, which are joined"
    )

    @property
    def text(self) -> str:
        """The whole text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(each.text for each in self.content)


class ChatRequest(SamplingFields):
    """A chat to answer."""

    refused: ClassVar[Mapping[str, str]] = {
        **SamplingFields.refused,
        "functions": "left out: use tools",
        "function_call": "left out: use tool_choice",
        "moderation": NO_MODERATION,
        "modalities": TEXT_ONLY,
        "audio": TEXT_ONLY,
        "web_search_options": "left out: search is not supported",
        "documents": "left out: put them into a message",
        "chat_template": "left out: only the model's own template is used",
        "chat_template_content_format": "left out: the template decides the form of contents",
        "separate_reasoning": "left out: use include_reasoning",
        "stream_reasoning": "left out: reasoning is streamed as it is generated",
        "use_audio_in_video": TEXT_ONLY,
        "add_special_tokens": "left out: the chat template adds them",
        "best_of": "left out: use n and select a choice",
    }

    api_names: ClassVar[Mapping[str, str]] = {
        **SamplingFields.api_names,
        "logprobs": "top_logprobs",
        "max_tokens": "max_completion_tokens",
        "prompt": "messages",
        "prompt length": "messages length",
    }

    parents: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("enable_thinking", "thinking"), "chat_template_kwargs"
    )

    messages: Annotated[list[Message], at_most(MAX_CHAT_MESSAGES, 1)] = Field(
        description="the chat, oldest message first; at most 1000"
    )
    max_tokens: int | None = number("older name of max_completion_tokens", 1)
    max_completion_tokens: int | None = number(
        "maximum number of tokens of each choice; default: up to the context length", 1
    )
    logprobs: bool = option("returns log-probabilities of the answer's tokens", False)
    top_logprobs: int | None = number(
        "number of most likely tokens to return at each position; needs logprobs", 0, 20
    )
    tools: Annotated[list[ToolDefinition], at_most(MAX_TOOLS)] | None = option(
        "functions that the model may call; at most 128"
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = option(
        "whether the model calls tools; default `auto`; or those that it may or must call"
    )
    prediction: Prediction | None = option(
        "text that the answer is expected to resemble, such as a file to edit; it is drafted"
    )
    parallel_tool_calls: bool = option("false limits an answer to one call", True)
    add_generation_prompt: bool | None = option("false omits the start of the assistant message")
    continue_final_message: bool = option("continues the last message", False)
    echo: bool = option("puts a last message of the assistant before the answer", False)
    chat_template_kwargs: dict[str, Any] | None = option(
        "variables of the chat template, such as `enable_thinking`"
    )
    reasoning_effort: str | None = option(
        "variable of the chat template; ignored with a warning if it has none"
    )
    verbosity: Literal["low", "medium", "high"] | None = option("likewise")
    thinking_token_budget: int | None = number(
        "ends reasoning that is longer, where the service separates it", 1
    )
    include_reasoning: bool = option(
        "false leaves out reasoning_content, where the service separates it", True
    )
    metadata: Metadata | None = option("accepted and ignored; at most 16 entries")
    store: bool | None = option("accepted; nothing is stored")
    service_tier: str | None = option("accepted; there is one tier")
    safety_identifier: str | None = option("accepted and ignored")
    prompt_cache_key: str | None = option(
        "session, which prefers its replica; prefix caching needs none"
    )
    prompt_cache_retention: str | None = option("accepted; the prefix cache keeps what fits")
    prompt_cache_options: Annotated[dict[str, Any], max_entries(16)] | None = option("likewise")

    @property
    def is_structured(self) -> bool:
        """Return whether a format of the whole text is required."""
        form = self.response_format
        return (
            (form is not None and form.type != "text")
            or self.structured_outputs is not None
            or bool(self.guided)
        )

    @property
    def num_best(self) -> int | None:
        """Number of most likely tokens at each position; None without log-probabilities."""
        if not self.logprobs:
            return None
        return 0 if self.logprob_token_ids else self.top_logprobs or 0

    def check_together(self) -> None:
        """Raise InvalidValueError for fields that exclude each other or are out of range."""
        super().check_together()
        require_range("thinking_token_budget", self.thinking_token_budget, 1, MAX_TOKEN_IDS)
        if self.top_logprobs and not self.logprobs:
            limit = "left out unless logprobs is true"
            raise InvalidValueError("top_logprobs", self.top_logprobs, limit)
        if self.logprob_token_ids and not self.logprobs:
            limit = "left out unless logprobs is true"
            raise InvalidValueError("logprob_token_ids", self.logprob_token_ids, limit)
        own = self.speculation.prediction if self.speculation is not None else None
        if self.prediction is not None and own is not None:
            limit = "left out where prediction is given"
            raise InvalidValueError("speculation.prediction", "given", limit)
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            limit = f"left out, or equal to max_tokens ({both[0]})"
            raise InvalidValueError("max_completion_tokens", both[1], limit)

    def sent_names(self) -> dict[str, str]:
        """Return the names that the client used for fields with several spellings."""
        names = {"structured_output.grammar": "tools"} if self.tools else {}
        if self.max_completion_tokens is None and self.max_tokens is not None:
            names["max_tokens"] = "max_tokens"
        if self.prediction is not None:
            names["speculation.prediction"] = "prediction.content"
        given = (name for name in TEMPLATE_FIELDS if getattr(self, name) is not None)
        names |= {f"chat_template_kwargs.{name}": name for name in given}
        return names | super().sent_names()


class AnsweredFunction(ResponseModel):
    """A function that the model calls."""

    name: str
    arguments: str = Field(description="JSON")


class AnsweredToolCall(ResponseModel):
    """A tool call; the client returns its result in a message of role `tool`."""

    id: str
    type: Literal["function"]
    function: AnsweredFunction


class AnswerMessage(ResponseModel):
    """The message of the assistant."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | None = Field(
        default=None, description="if the service has a parser of reasoning"
    )
    reasoning: str | None = Field(default=None, description="the same, by vLLM's name")
    tool_calls: list[AnsweredToolCall] = Field(default=[], description="if the model calls tools")


class ChatChoice(ResponseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None = Field(description="the stop string or token that ended it")
    matched_stop: str | int | None = Field(
        description="SGLang's field: the same, or the end-of-sequence token"
    )
    token_ids: list[int] | None = Field(description=TOKEN_IDS)


class ChatCompletion(GenerationBody):
    """The response without streaming."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = Field(description="null unless requested")
    prompt_token_ids: list[int] | None = Field(description=TOKEN_IDS)
