"""What is asked: the prompts of a file, or words drawn at random."""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specdec.types.sampling_params import SpeculationOptions

_WORDS = (
    *("the", "of", "and", "to", "in", "is", "that", "for", "on", "with", "as", "by"),
    *("at", "from", "this", "be", "are", "or", "an", "have", "not", "it", "was", "but"),
)
"""Each is one token, with the space before it, in the vocabularies that are trained on English."""


@dataclass(frozen=True)
class Question:
    """One request. cache_salt: its cached prompt is for those of the same one; empty: not sent."""

    prompt: str
    max_tokens: int
    cache_salt: str = ""


@dataclass(frozen=True)
class HowToAsk:
    """What all requests have in common.

    temperature: None leaves it to the service. ignore_eos: answers are as long as they may be.
    speculation: None says nothing of it.
    """

    temperature: float | None = 0.0
    seed: int | None = 0
    ignore_eos: bool = False
    speculation: SpeculationOptions | None = None


class QuestionSource(Protocol):
    """Makes the questions of a run."""

    def questions(self, count: int, run: int) -> list[Question]:
        """So many. Nothing of one run is in the prefix cache for another."""
        ...


@dataclass(frozen=True)
class PromptFile:
    """The prompts of a file in their order, from the first again where they are too few."""

    prompts: Sequence[str]
    max_tokens: int
    with_cache_salt: bool = True

    def questions(self, count: int, run: int) -> list[Question]:
        """Runs are told apart by their salts; within one, a repeated prompt may be cached."""
        salt = _new_salt(self.with_cache_salt)
        chosen = (self.prompts[index % len(self.prompts)] for index in range(count))
        return [Question(prompt, self.max_tokens, salt) for prompt in chosen]


@dataclass(frozen=True)
class RandomWords:
    """Prompts of common words, each about a token, that differ from the first word on.

    input_len, output_len: words, and most tokens of the answer. range_ratio: by what share of them
    either may be less or more, evenly drawn. prefix_len: words before these, the same in all.
    """

    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 0
    seed: int = 0
    with_cache_salt: bool = True

    def questions(self, count: int, run: int) -> list[Question]:
        """The same words for the same seed and run, which a service may have been asked before."""
        salt = _new_salt(self.with_cache_salt)
        shared = random.Random(f"{self.seed} prefix")
        prefix = shared.choices(_WORDS, k=self.prefix_len)
        draw = random.Random(f"{self.seed} {run}")
        return [self._question(draw, prefix, salt) for _ in range(count)]

    def _question(self, draw: random.Random, prefix: list[str], salt: str) -> Question:
        words = draw.choices(_WORDS, k=self._length(draw, self.input_len))
        return Question(" ".join(prefix + words), self._length(draw, self.output_len), salt)

    def _length(self, draw: random.Random, mean: int) -> int:
        spread = int(mean * self.range_ratio)
        return max(1, draw.randint(mean - spread, mean + spread))


def _new_salt(is_wanted: bool) -> str:
    """Shared by all questions of a run, and by nobody else's."""
    return secrets.token_urlsafe() if is_wanted else ""
