"""The bodies of `/tokenize`, `/detokenize` and `/v1/models`."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field

from cluster.api.openai.chat_schema import MAX_TOOLS, Message, ToolDefinition
from cluster.api.openai.schema import AnswerModel, RequestModel, at_most, option
from cluster.replica.limits import MAX_CHAT_MESSAGES, MAX_TOKEN_IDS


class TokenizeRequest(RequestModel):
    """A text or a chat to encode, exactly as it would be as a prompt."""

    refused = MappingProxyType({"chat_template": "left out: the model's template is used"})

    model: str | None = option("at most 256 characters; left out: the model that is loaded")
    prompt: str | None = Field(
        default=None, max_length=1_000_000, description="a text; at most 1,000,000 characters"
    )
    messages: Annotated[list[Message], at_most(MAX_CHAT_MESSAGES, 1)] | None = option(
        "a chat, in place of a text"
    )
    add_special_tokens: bool = option("whether a text gets the special tokens that begin one", True)
    add_generation_prompt: bool | None = option("of a chat: false leaves the turn unopened")
    continue_final_message: bool = option("of a chat: leaves the last message open", False)
    chat_template_kwargs: dict[str, Any] | None = option("of a chat: variables of the template")
    tools: Annotated[list[ToolDefinition], at_most(MAX_TOOLS)] | None = option(
        "of a chat: functions that may be called"
    )
    return_token_strs: bool = option("tells each token as the vocabulary spells it", False)


class TokenizeAnswer(AnswerModel):
    """The tokens, and how many there may be."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(RequestModel):
    """Tokens to decode; special ones are left out of the text."""

    model: str | None = option("at most 256 characters; left out: the model that is loaded")
    tokens: Annotated[list[int], at_most(MAX_TOKEN_IDS)] = Field(
        description="token ids; at most 1,000,000"
    )


class DetokenizeAnswer(AnswerModel):
    """The text."""

    prompt: str


class ModelCard(AnswerModel):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int = Field(description="when this replica began to serve it")
    owned_by: str
    max_model_len: int
    speculation_methods: list[str]


class ModelList(AnswerModel):
    """All there are, which is one."""

    object: Literal["list"]
    data: list[ModelCard]
