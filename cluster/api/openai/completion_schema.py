"""Requests and responses of `/v1/completions`."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from cluster.api.openai.logprobs import CompletionLogprobs, PromptLogprobs
from cluster.api.openai.sampling_fields import SamplingFields
from cluster.api.openai.schema import ResponseModel, Usage, at_most, number, option
from cluster.api.openai.structure import ResponseFormat
from cluster.replica.limits import MAX_TOKEN_IDS

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

    refused = MappingProxyType(
        {
            **SamplingFields.refused,
            "suffix": "left out: infilling is not supported",
            "best_of": "left out: use n and select a choice",
            "tools": "left out: use /v1/chat/completions",
            "messages": "left out: use /v1/chat/completions",
        }
    )

    prompt: Prompts = Field(description="a text or token ids, or at most 128 of either; not empty")
    max_tokens: int | None = number(
        f"maximum number of tokens of each choice; default {DEFAULT_MAX_TOKENS}; 0 needs `echo`", 0
    )
    logprobs: int | None = number(
        "number of most likely tokens to return at each position, beside the sampled one", 0, 20
    )
    echo: bool = option("puts the prompt before each choice, also in logprobs", False)
    add_special_tokens: bool = option("adds the special tokens that start a text", True)
    response_format: ResponseFormat | None = option("required format of the text")


class CompletionChoice(ResponseModel):
    """One completion. index: counts the choices of the first prompt first."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None = Field(description="null in a stream only")
    stop_reason: str | int | None = Field(
        default=None, description="the stop string or token that ended it"
    )
    token_ids: list[int] = Field(default=[], description="if requested")
    prompt_token_ids: list[int] = Field(default=[], description="if requested")
    prompt_logprobs: PromptLogprobs | None = Field(default=None, description="if requested")


class Completion(ResponseModel):
    """The response; in a stream, each event is one, with an increment."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    seed: int = Field(description="seed of the request, or the chosen one")
    choices: list[CompletionChoice]
    usage: Usage | None = Field(default=None, description="null in a stream unless requested")
