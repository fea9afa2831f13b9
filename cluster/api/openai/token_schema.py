"""Requests and responses of `/tokenize`, `/detokenize` and `/v1/models`."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field

from cluster.api.openai.chat_schema import MAX_TOOLS, Message, ToolDefinition
from cluster.api.openai.sampling_fields import MODEL_MEANING
from cluster.api.openai.schema import RequestModel, ResponseModel, at_most, option
from cluster.replica.limits import MAX_CHAT_MESSAGES, MAX_TOKEN_IDS


class TokenizeRequest(RequestModel):
    """A text or a chat to tokenize, exactly as a prompt."""

    refused = MappingProxyType({"chat_template": "left out: only the model's own template is used"})

    model: str | None = option(MODEL_MEANING)
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

    model: str | None = option(MODEL_MEANING)
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
    max_model_len: int
    speculation_methods: list[str]


class ModelList(ResponseModel):
    """All served models."""

    object: Literal["list"]
    data: list[ModelCard]
