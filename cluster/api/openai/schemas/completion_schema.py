"""Requests and responses of `/v1/completions`, `/tokenize`, `/detokenize` and `/v1/models`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from cluster.api.base.openai_schema import (
    GenerationBody,
    RequestModel,
    ResponseModel,
    Usage,
    at_most,
    number,
    option,
    same_as,
)
from cluster.api.openai.logprobs import CompletionLogprobs, PromptLogprobs
from cluster.api.openai.schemas.chat_schema import MAX_TOOLS, Message, ToolDefinition
from cluster.api.openai.schemas.sampling_fields import TOKEN_IDS, SamplingFields
from cluster.replica.limits import MAX_CHAT_MESSAGES, MAX_TOKEN_IDS
from specdec.types.errors import InvalidValueError

MAX_PROMPTS = 128
DEFAULT_MAX_TOKENS = 16
"""OpenAI's default, which clients rely on."""

TokenIds = Annotated[list[int], at_most(MAX_TOKEN_IDS)]


def _kind(prompt: Any) -> str:
    """Return the kind of a prompt, by its first item; only this kind is validated."""
    if not isinstance(prompt, list):
        return "text"
    match prompt:
        case [str(), *_]:
            return "texts"
        case [list(), *_]:
            return "several token ids"
        case _:
            return "token ids"


Prompts = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], at_most(MAX_PROMPTS), Tag("texts")]
    | Annotated[TokenIds, Tag("token ids")]
    | Annotated[list[TokenIds], at_most(MAX_PROMPTS), Tag("several token ids")],
    Discriminator(_kind),
]


class CompletionRequest(SamplingFields):
    """Texts to complete."""

    refused: ClassVar[Mapping[str, str]] = {
        **SamplingFields.refused,
        "suffix": "left out: infilling is not supported",
        "best_of": "left out: use n and select a choice",
        "tools": "left out: use /v1/chat/completions",
        "messages": "left out: use /v1/chat/completions",
    }

    prompt: Prompts = Field(description="a text or token ids, or at most 128 of either; not empty")
    max_tokens: int | None = number(
        "maximum number of tokens of each choice; 0 needs `echo`; "
        f"default {DEFAULT_MAX_TOKENS}, or what the context has left",
        0,
    )
    logprobs: int | None = number(
        "number of most likely tokens to return at each position, beside the sampled one", 0, 20
    )
    echo: bool = option("puts the prompt before each choice, also in logprobs", False)
    add_special_tokens: bool = option("adds the special tokens that start a text", True)
    json_schema: str | None = option("SGLang's name of guided_json")

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        prompt: Any = self.prompt
        is_one = isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], int))
        return [prompt] if is_one else prompt

    def check_together(self) -> None:
        """Raise InvalidValueError for fields that exclude each other or are out of range."""
        super().check_together()
        if self.logprob_token_ids and (self.logprobs is None or self.echo):
            limit = "left out unless logprobs is given and echo is false"
            raise InvalidValueError("logprob_token_ids", self.logprob_token_ids, limit)


class CompletionChoice(ResponseModel):
    """One completion. index: counts the choices of the first prompt first."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None = Field(description="null in a stream only")
    stop_reason: str | int | None = Field(
        default=None, description="the stop string or token that ended it"
    )
    matched_stop: str | int | None = Field(
        default=None, description="SGLang's field: the same, or the end-of-sequence token"
    )
    token_ids: list[int] | None = Field(default=None, description=TOKEN_IDS)
    prompt_token_ids: list[int] | None = Field(default=None, description=TOKEN_IDS)
    prompt_logprobs: PromptLogprobs | None = Field(
        default=None, description="null unless requested; in a stream it is left out"
    )


class Completion(GenerationBody):
    """The response; in a stream, each event is one, with an increment."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = Field(default=None, description="null in a stream unless requested")


class TokenizeRequest(RequestModel):
    """A text or a chat to tokenize, exactly as a prompt."""

    refused: ClassVar[Mapping[str, str]] = {
        "chat_template": "left out: only the model's own template is used"
    }
    api_names: ClassVar[Mapping[str, str]] = {"text": "prompt"}

    model: str | None = same_as(SamplingFields, "model")
    prompt: str | None = Field(
        default=None, max_length=1_000_000, description="a text; at most 1,000,000 characters"
    )
    messages: Annotated[list[Message], at_most(MAX_CHAT_MESSAGES, 1)] | None = option(
        "a chat, instead of a text"
    )
    add_special_tokens: bool = option("adds the special tokens that start a text", True)
    add_generation_prompt: bool | None = option(
        "for a chat: false omits the start of the assistant message"
    )
    continue_final_message: bool = option("for a chat: leaves the last message open", False)
    chat_template_kwargs: dict[str, Any] | None = option("for a chat: variables of the template")
    tools: Annotated[list[ToolDefinition], at_most(MAX_TOOLS)] | None = option(
        "for a chat: functions that the model may call"
    )
    return_token_strs: bool = option("returns each token's entry in the vocabulary", False)


class TokenizeAnswer(ResponseModel):
    """The tokens, and the context length."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(RequestModel):
    """Tokens to decode; the text has no special tokens."""

    api_names: ClassVar[Mapping[str, str]] = {"token_ids": "tokens"}

    model: str | None = same_as(SamplingFields, "model")
    tokens: Annotated[list[int], at_most(MAX_TOKEN_IDS)] = Field(
        description="token ids; at most 1,000,000"
    )


class DetokenizeAnswer(ResponseModel):
    """The decoded text."""

    prompt: str


class ModelCard(ResponseModel):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int = Field(description="Unix time of the start of this replica")
    owned_by: str
    root: str = Field(description="the name again: vLLM has a path here, which is not shown")
    parent: str | None = Field(None, description="the model of a LoRA adapter")
    max_model_len: int
    speculation_methods: list[str]


class ModelList(ResponseModel):
    """All served models."""

    object: Literal["list"]
    data: list[ModelCard]
