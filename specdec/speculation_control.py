"""What is wanted of speculation, by configuration, operator or rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specdec.errors import InvalidValueError
from specdec.sampling_params import (
    MAX_NUM_SPECULATIVE_TOKENS,
    SPECULATION_METHODS,
    VERIFIERS,
    SpeculationMethod,
    VerifierName,
)

SpeculationMode = Literal["auto", "on", "off"]
SPECULATION_MODES: tuple[SpeculationMode, ...] = ("auto", "on", "off")

MAX_SPECULATION_THRESHOLD = 4096
"""As many requests as an engine may be told to run at once."""


@dataclass(frozen=True)
class SpeculationControl:
    """What is wanted of speculation. With coupled verification it changes no token.

    mode: on and off hold at every load; auto goes by the threshold and, below it, by the policy.
    threshold: largest number of decoding requests that mode auto drafts for.
    num_speculative_tokens: draft tokens a step for requests that do not choose, and most that a
        policy may choose; 0 drafts for none.
    method: what drafts for requests that do not choose; None for all that is loaded, in its order.
    allow_request_override: whether what a request says of method, number and opting out is heeded.
    allowed_verifiers: what new requests may name.
    is_by_rule: whether a rule on the rate of requests has chosen mode or number.
    """

    mode: SpeculationMode
    threshold: int
    num_speculative_tokens: int
    method: SpeculationMethod | None = None
    allow_request_override: bool = True
    allowed_verifiers: tuple[VerifierName, ...] = VERIFIERS
    is_by_rule: bool = False

    def __post_init__(self) -> None:
        _require_word("mode", self.mode, SPECULATION_MODES)
        require_count("threshold", self.threshold, MAX_SPECULATION_THRESHOLD)
        require_count(
            "num_speculative_tokens", self.num_speculative_tokens, MAX_NUM_SPECULATIVE_TOKENS
        )
        if self.method is not None:
            _require_word("method", self.method, SPECULATION_METHODS)
        if type(self.allow_request_override) is not bool:
            limit = "true or false"
            raise InvalidValueError("allow_request_override", self.allow_request_override, limit)
        if not self.allowed_verifiers:
            raise InvalidValueError("allowed_verifiers", (), "one verifier or more")
        for index, name in enumerate(self.allowed_verifiers):
            _require_word(f"allowed_verifiers[{index}]", name, VERIFIERS)


def _require_word(name: str, value: object, words: tuple[str, ...]) -> None:
    if value not in words:
        raise InvalidValueError(name, value, f"one of {', '.join(words)}")


def require_count(name: str, value: int, high: int) -> None:
    """Raises InvalidValueError unless `value` is an int from 0 to `high`."""
    if type(value) is not int or not 0 <= value <= high:  # to isinstance, True is an int
        raise InvalidValueError(name, value, f"a whole number from 0 to {high}")
