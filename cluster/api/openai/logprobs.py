"""Log-probabilities in the two shapes that the API has for them.

They are the model's own, taken before anything in the request shapes the logits.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import Field

from cluster.api.openai.schema import AnswerModel
from specdec.text.vocab_bytes import TokenBytes
from specdec.types.messages import Logprobs

LOWEST_LOGPROB = -9999.0
"""JSON has no minus infinity; it is what OpenAI says for a token that cannot come."""


class TopLogprob(AnswerModel):
    """One of the likeliest tokens at a place."""

    token: str
    logprob: float
    bytes: list[int] = Field(description="UTF-8; a token may be part of a character")


class TokenLogprob(TopLogprob):
    """The token at a place, and the likeliest ones there."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(AnswerModel):
    """Of the tokens of a chat's answer."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(AnswerModel):
    """Of the tokens of a plain completion, one entry in each list for each token."""

    text_offset: list[int] = Field(
        description="characters of the text that are complete before the token"
    )
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(AnswerModel):
    """One token that could stand at a place of the prompt."""

    logprob: float
    rank: int | None = Field(description="1 for the likeliest; null where it is not known")
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt, tokens by id; null for the first, which nothing goes before."""


@dataclass(frozen=True)
class TokenNames:
    """How tokens are called: by their text, or where `as_ids` by their id."""

    token_bytes: TokenBytes
    as_ids: bool = False

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """One for one; what is no UTF-8 by itself has U+FFFD in it."""
        if self.as_ids:
            return [f"token_id:{each}" for each in token_ids]
        return [each.decode(errors="replace") for each in self.token_bytes.of(token_ids)]


@dataclass(frozen=True)
class _Entry:
    token_id: int
    name: str
    raw: bytes
    logprob: float


def chat_logprobs(logprobs: Logprobs, names: TokenNames) -> ChoiceLogprobs:
    """A place's own token first, then the likeliest ones."""
    places = _places(logprobs, names)
    return ChoiceLogprobs(content=[_token_logprob(own, best) for own, *best in places])


def _token_logprob(own: _Entry, best: Sequence[_Entry]) -> TokenLogprob:
    return TokenLogprob(
        token=own.name,
        logprob=own.logprob,
        bytes=list(own.raw),
        top_logprobs=[
            TopLogprob(token=each.name, logprob=each.logprob, bytes=list(each.raw)) for each in best
        ],
    )


class CompletionLogprobsWriter:
    """Of one choice, whose tokens come bit by bit."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def skip(self, token_ids: Sequence[int]) -> CompletionLogprobs:
        """A first token, of which there is nothing to tell."""
        [name] = self._names.of(token_ids)
        told = CompletionLogprobs(
            text_offset=[self._offset], token_logprobs=[None], tokens=[name], top_logprobs=[None]
        )
        [raw] = self._names.token_bytes.of(token_ids)
        self._pass(raw)
        return told

    def write(self, logprobs: Logprobs) -> CompletionLogprobs:
        """The next places. A token that is not among the likeliest is told besides them."""
        told = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        for own, *best in _places(logprobs, self._names):
            told.text_offset.append(self._offset)
            told.tokens.append(own.name)
            told.token_logprobs.append(own.logprob)
            listed = {each.name: each.logprob for each in (*best, own)}
            told.top_logprobs.append(listed)
            self._pass(own.raw)
        return told

    def _pass(self, raw: bytes) -> None:
        """Goes on by the characters that a token completes, however it is called."""
        self._offset += len(self._decoder.decode(raw))


def joined(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    """All of them behind one another."""
    return CompletionLogprobs(
        text_offset=[each for part in parts for each in part.text_offset],
        token_logprobs=[each for part in parts for each in part.token_logprobs],
        tokens=[each for part in parts for each in part.tokens],
        top_logprobs=[each for part in parts for each in part.top_logprobs],
    )


def prompt_logprobs(logprobs: Logprobs, names: TokenNames) -> PromptLogprobs:
    """The same in vLLM's shape."""
    told: PromptLogprobs = [None]
    ranks = logprobs.ranks.tolist()
    for (own, *best), rank in zip(_places(logprobs, names), ranks, strict=True):
        listed = {str(each.token_id): _prompt_logprob(each, i) for i, each in enumerate(best, 1)}
        listed[str(own.token_id)] = _prompt_logprob(own, rank)
        told.append(listed)
    return told


def _prompt_logprob(entry: _Entry, rank: int | None) -> PromptLogprob:
    return PromptLogprob(logprob=entry.logprob, rank=rank, decoded_token=entry.name)


def _places(logprobs: Logprobs, names: TokenNames) -> Iterator[list[_Entry]]:
    """For each position, its own token and then the likeliest ones."""
    for token_ids, values in zip(
        logprobs.token_ids.tolist(), logprobs.logprobs.tolist(), strict=True
    ):
        raw = names.token_bytes.of(token_ids)
        yield [
            _Entry(token_id, name, data, max(value, LOWEST_LOGPROB))
            for token_id, name, data, value in zip(
                token_ids, names.of(token_ids), raw, values, strict=True
            )
        ]
