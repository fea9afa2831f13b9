"""The bodies of `/v1/completions`, in both directions."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from cluster.api.openai.logprobs import CompletionLogprobs, PromptLogprobs
from cluster.api.openai.sampling_fields import SamplingFields
from cluster.api.openai.schema import AnswerModel, Usage, at_most, number, option
from cluster.api.openai.structure import ResponseFormat
from cluster.replica.limits import MAX_TOKEN_IDS

MAX_PROMPTS = 128
DEFAULT_MAX_TOKENS = 16
"""As OpenAI has it, whose clients rely on short answers."""

TokenIds = Annotated[list[int], at_most(MAX_TOKEN_IDS)]


def _kind(prompt: Any) -> str:
    """What a prompt is, by its first item: it is checked as that alone."""
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
    """Texts to go on with, as they are."""

    refused = MappingProxyType(
        {
            **SamplingFields.refused,
            "suffix": "left out: the models do not fill in",
            "best_of": "left out: ask for n choices and choose",
            "tools": "left out: only chats have them",
            "messages": "left out: chats go to /v1/chat/completions",
        }
    )

    prompt: Prompts = Field(description="a text or token ids, or at most 128 of either; not empty")
    max_tokens: int | None = number(
        f"most tokens of each choice; 0 with `echo` only; left out: {DEFAULT_MAX_TOKENS}", 0
    )
    logprobs: int | None = number("the likeliest tokens to tell of, beside the text's own", 0, 20)
    echo: bool = option("puts the prompt before each choice, in logprobs too", False)
    add_special_tokens: bool = option("whether a text gets the special tokens that begin one", True)
    response_format: ResponseFormat | None = option("what the whole text has to be")


class CompletionChoice(AnswerModel):
    """One completion. index: choices of the first prompt come first."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None = Field(description="null in a stream only")
    stop_reason: str | int | None = Field(default=None, description="what ended it")
    token_ids: list[int] = Field(default=[], description="where asked for")
    prompt_token_ids: list[int] = Field(default=[], description="where asked for")
    prompt_logprobs: PromptLogprobs | None = Field(default=None, description="where asked for")


class Completion(AnswerModel):
    """The answer; streamed, each event is one with what is added."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    seed: int = Field(description="the request's, or the one that was chosen")
    choices: list[CompletionChoice]
    usage: Usage | None = Field(default=None, description="null in a stream, but where asked for")
