"""Benchmark requests, from the prompts of a file or of random words, and their arrival times."""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from specdec.types.errors import InvalidValueError

_WORDS = (
    *("the", "of", "and", "to", "in", "is", "that", "for", "on", "with", "as", "by"),
    *("at", "from", "this", "be", "are", "or", "an", "have", "not", "it", "was", "but"),
)
"""With a leading space, each is one token in the usual vocabularies for English."""


@dataclass(frozen=True)
class SampleRequest:
    """One request. cache_salt: requests with the same one share the prefix cache; "": not sent."""

    prompt: str
    max_tokens: int
    cache_salt: str = ""


class Dataset(Protocol):
    """A source of requests."""

    def requests(self, count: int, run: int) -> list[SampleRequest]:
        """Return `count` requests that do not share the prefix cache with another run."""
        ...


@dataclass(frozen=True)
class PromptFileDataset:
    """The prompts of a file in order, repeated if there are too few."""

    prompts: Sequence[str]
    max_tokens: int
    with_cache_salt: bool = True

    def requests(self, count: int, run: int) -> list[SampleRequest]:
        """Return requests with the salt of this run; repeated prompts may be cached within it."""
        salt = _new_salt(self.with_cache_salt)
        chosen = (self.prompts[index % len(self.prompts)] for index in range(count))
        return [SampleRequest(prompt, self.max_tokens, salt) for prompt in chosen]


@dataclass(frozen=True)
class RandomDataset:
    """Prompts of random common words, each about one token.

    input_len: words of the prompt. output_len: maximum output tokens. range_ratio: ratio r, for
    which both lengths are drawn uniformly from [(1-r)L, (1+r)L]. prefix_len: words of a prefix that
    all prompts share.
    """

    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 0
    seed: int = 0
    with_cache_salt: bool = True

    def requests(self, count: int, run: int) -> list[SampleRequest]:
        """Return requests whose words depend on the seed and the run alone."""
        salt = _new_salt(self.with_cache_salt)
        shared = random.Random(f"{self.seed} prefix")
        prefix = shared.choices(_WORDS, k=self.prefix_len)
        draw = random.Random(f"{self.seed} {run}")
        return [self._request(draw, prefix, salt) for _ in range(count)]

    def _request(self, draw: random.Random, prefix: list[str], salt: str) -> SampleRequest:
        words = draw.choices(_WORDS, k=self._length(draw, self.input_len))
        return SampleRequest(" ".join(prefix + words), self._length(draw, self.output_len), salt)

    def _length(self, draw: random.Random, mean: int) -> int:
        spread = int(mean * self.range_ratio)
        return max(1, draw.randint(mean - spread, mean + spread))


def _new_salt(with_cache_salt: bool) -> str:
    """Return a unique salt for the requests of one run, or ""."""
    return secrets.token_urlsafe() if with_cache_salt else ""


def read_prompts(path: Path) -> list[str]:
    """Read a JSON lines file; each line is a text, or an object with `prompt` or `turns`.

    Only the first turn is used. Raises InvalidValueError for other content and for an empty file.
    """
    lines = enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), start=1)
    prompts = [_prompt(line, f"{path} line {number}") for number, line in lines if line.strip()]
    if not prompts:
        limit = "a JSON lines file with at least one prompt"
        raise InvalidValueError("prompts", str(path), limit)
    return prompts


def _prompt(line: str, where: str) -> str:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if isinstance(record, dict):
        turns = record.get("turns")
        record = turns[0] if isinstance(turns, list) and turns else record.get("prompt")
    if not isinstance(record, str) or not record:
        limit = "a JSON string, or an object with prompt (a string) or turns (a list of strings)"
        raise InvalidValueError(where, line[:80], limit)
    return record


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return the ascending arrival times of `count` requests, in seconds since the start.

    rate: mean requests per second. burstiness: shape of the gamma distribution of the gaps, whose
    mean is 1 / rate: 1 makes a Poisson process, less is burstier, more is more uniform. The same
    seed gives the same times; another rate scales them.
    """
    draw = random.Random(seed)
    gaps = (draw.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(count))
    return list(accumulate(gaps))
