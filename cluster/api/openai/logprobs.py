"""Log-probabilities in the formats of chats, completions and prompts.

They are of the unmodified logits, before any sampling parameter applies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from pydantic import Field

from cluster.api.base.openai_schema import ResponseModel
from cluster.replica.preprocessor import Preprocessor
from specdec.text.detokenizer import IncrementalDetokenizer
from specdec.text.vocab_bytes import TokenBytes
from specdec.types.messages import Logprobs

LOWEST_LOGPROB = -9999.0
"""OpenAI's value for an impossible token: JSON has no minus infinity."""


class TopLogprob(ResponseModel):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    bytes: list[int] = Field(description="UTF-8; a token may be part of a character")


class TokenLogprob(TopLogprob):
    """The token at a position, and the most likely ones there."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(ResponseModel):
    """Log-probabilities of the tokens of a chat's answer."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(ResponseModel):
    """Log-probabilities of a plain completion, one entry in each list for each token."""

    text_offset: list[int] = Field(
        description="number of complete characters of the text before the token"
    )
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(ResponseModel):
    """A candidate token at a position of the prompt."""

    logprob: float
    rank: int | None = Field(description="1 for the most likely; null if unknown")
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt, candidates by token id; null for the first token."""


@dataclass(frozen=True)
class TokenNames:
    """Names of tokens: their text, or with `as_ids` their id."""

    token_bytes: TokenBytes
    as_ids: bool = False

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """Return the name of each token; bytes that are not UTF-8 become U+FFFD."""
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
    """Convert to the format of a chat. As in vLLM the own token is among given ones."""
    content = []
    for own, *rest in _positions(logprobs, names):
        if logprobs.num_given:
            rest = list({each.token_id: each for each in (own, *rest)}.values())
        best = [TopLogprob(**_fields(each)) for each in rest]
        content.append(TokenLogprob(**_fields(own), top_logprobs=best))
    return ChoiceLogprobs(content=content)


def _fields(entry: _Entry) -> dict[str, Any]:
    return {"token": entry.name, "logprob": entry.logprob, "bytes": list(entry.raw)}


class CompletionLogprobsWriter:
    """Converter to the format of a completion, for one choice whose tokens arrive in parts."""

    def __init__(
        self, names: TokenNames, detokenizer: IncrementalDetokenizer, echoed: Sequence[int] = ()
    ) -> None:
        """detokenizer: of the text whose characters offsets count, without stop strings.

        echoed: characters of each token of a prompt before it.
        """
        self._names = names
        self._offset = 0
        self._detokenizer = detokenizer
        self._echoed = tuple(echoed)

    async def resume(self, text: Preprocessor, token_ids: Sequence[int]) -> None:
        """Add tokens that the client has. Raise the errors of `Preprocessor.received`."""
        received = await text.received(self._detokenizer, token_ids)
        self._offset = len(received.text)

    def skip(self, token_ids: Sequence[int]) -> CompletionLogprobs:
        """Add the first token of a prompt, which has no log-probability."""
        [name] = self._names.of(token_ids)
        offsets = self._offsets(token_ids)
        return CompletionLogprobs(
            text_offset=offsets, token_logprobs=[None], tokens=[name], top_logprobs=[None]
        )

    def write(self, logprobs: Logprobs) -> CompletionLogprobs:
        """Add the next tokens. `top_logprobs` lists each token too if it is not among the best."""
        offsets = self._offsets(logprobs.token_ids[:, 0].tolist())
        result = CompletionLogprobs(
            text_offset=offsets, token_logprobs=[], tokens=[], top_logprobs=[]
        )
        for own, *best in _positions(logprobs, self._names):
            result.tokens.append(own.name)
            result.token_logprobs.append(own.logprob)
            result.top_logprobs.append({each.name: each.logprob for each in (*best, own)})
        return result

    def _offsets(self, token_ids: Sequence[int]) -> list[int]:
        """Return the offset of each token, and advance by the characters that they complete."""
        count = len(token_ids)
        lengths, self._echoed = self._echoed[:count], self._echoed[count:]
        if not lengths:
            self._detokenizer.extend(token_ids)
            self._detokenizer.take()
            lengths = self._detokenizer.lengths
        *offsets, self._offset = accumulate(lengths, initial=self._offset)
        return offsets


def concatenate(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    """Concatenate parts of one choice."""
    lists = {
        name: [each for part in parts for each in getattr(part, name)]
        for name in CompletionLogprobs.model_fields
    }
    return CompletionLogprobs(**lists)


def prompt_logprobs(logprobs: Logprobs, names: TokenNames) -> PromptLogprobs:
    """Convert to vLLM's format for the tokens of a prompt, without the given ones."""
    logprobs = logprobs.best(logprobs.num_best)
    result: PromptLogprobs = [None]
    ranks = logprobs.ranks.tolist()
    for (own, *best), rank in zip(_positions(logprobs, names), ranks, strict=True):
        entries = {str(each.token_id): _prompt_logprob(each, i) for i, each in enumerate(best, 1)}
        entries[str(own.token_id)] = _prompt_logprob(own, rank)
        result.append(entries)
    return result


def _prompt_logprob(entry: _Entry, rank: int | None) -> PromptLogprob:
    return PromptLogprob(logprob=entry.logprob, rank=rank, decoded_token=entry.name)


def _positions(logprobs: Logprobs, names: TokenNames) -> Iterator[list[_Entry]]:
    """Yield the entries of each position: its own token, then the most likely ones."""
    values = np.maximum(logprobs.logprobs, LOWEST_LOGPROB).tolist()
    for token_ids, row in zip(logprobs.token_ids.tolist(), values, strict=True):
        raw = names.token_bytes.of(token_ids)
        yield [_Entry(*each) for each in zip(token_ids, names.of(token_ids), raw, row, strict=True)]
