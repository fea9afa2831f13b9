"""What a request may ask of sampling and of speculation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from specdec.errors import InvalidValueError

SpeculationMethod = Literal["ngram", "draft_model"]
SPECULATION_METHODS: tuple[SpeculationMethod, ...] = ("ngram", "draft_model")

MAX_NUM_SPECULATIVE_TOKENS = 32
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
SEED_LIMIT = 2**63


@dataclass(frozen=True)
class SpeculationOptions:
    """Per-request speculation; it changes the speed of a request, never its tokens.

    enabled: None leaves it to the service; False opts out; True asks for it where it is loaded.
    num_speculative_tokens: draft tokens a step; None takes the service's number.
    method: a proposer that the service has loaded; None takes the service's.
    """

    enabled: bool | None = None
    num_speculative_tokens: int | None = None
    method: SpeculationMethod | None = None

    def __post_init__(self) -> None:
        count = self.num_speculative_tokens
        if count is not None and not 0 <= count <= MAX_NUM_SPECULATIVE_TOKENS:
            limit = f"from 0 to {MAX_NUM_SPECULATIVE_TOKENS}"
            raise InvalidValueError("speculation.num_speculative_tokens", count, limit)
        if self.method is not None and self.method not in SPECULATION_METHODS:
            limit = f"one of {', '.join(SPECULATION_METHODS)}"
            raise InvalidValueError("speculation.method", self.method, limit)


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn. Applied in this order: temperature, top_k, top_p.

    temperature: divides the logits; 0 is greedy.
    top_p: keeps the most likely tokens whose probabilities sum to at least top_p. Tokens exactly
        as likely as the last one kept are kept too, so the support never depends on sort order.
    top_k: keeps the top_k most likely tokens, ties with the last one included; 0 keeps all.
    seed: fixes every random choice; None lets the service choose one, and tell which.
    stop: strings that end the text; the text returned ends before the first of them.
    max_tokens: most tokens to generate; None leaves as many as the context length allows.
    ignore_eos: goes on after an end-of-sequence token (for benchmarks).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    ignore_eos: bool = False
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)

    def __post_init__(self) -> None:
        _require_finite("temperature", self.temperature)
        _require_finite("top_p", self.top_p)
        if not 0 <= self.temperature <= 100:
            raise InvalidValueError("temperature", self.temperature, "from 0 to 100")
        if not 0 < self.top_p <= 1:
            raise InvalidValueError("top_p", self.top_p, "above 0 and at most 1")
        if not 0 <= self.top_k < 2**31:
            raise InvalidValueError("top_k", self.top_k, "0 (all tokens) or a positive int32")
        if self.seed is not None and not 0 <= self.seed < SEED_LIMIT:
            raise InvalidValueError("seed", self.seed, "from 0 to 2^63 - 1")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidValueError("max_tokens", self.max_tokens, "at least 1")
        self._check_stop()

    def _check_stop(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidValueError("stop", self.stop, f"at most {MAX_STOP_STRINGS} strings")
        for index, text in enumerate(self.stop):
            if not 1 <= len(text) <= MAX_STOP_CHARS:
                raise InvalidValueError(f"stop[{index}]", text, f"1 to {MAX_STOP_CHARS} characters")


def _require_finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise InvalidValueError(name, value, "a finite number")
