"""What is wanted of speculation, by configuration, operator or rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, cast

from specdec.types.errors import InvalidValueError
from specdec.types.sampling_params import MAX_NUM_SPECULATIVE_TOKENS, VERIFIERS, VerifierName

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
    method: str | None = None
    allow_request_override: bool = True
    allowed_verifiers: tuple[VerifierName, ...] = VERIFIERS
    is_by_rule: bool = False

    def __post_init__(self) -> None:
        _require_word("mode", self.mode, SPECULATION_MODES)
        require_count("threshold", self.threshold, MAX_SPECULATION_THRESHOLD)
        require_count(
            "num_speculative_tokens", self.num_speculative_tokens, MAX_NUM_SPECULATIVE_TOKENS
        )
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


MAX_RULES = 16
MAX_REQUESTS_PER_S = 1e6
LEAVING_SHARE = 0.8
"""A rule that holds does so until the rate is below this share of its own."""


@dataclass(frozen=True)
class SpeculationRule:
    """Holds from so many requests a second on. What is None is as it would be without the rule."""

    min_requests_per_s: float
    mode: SpeculationMode | None = None
    num_speculative_tokens: int | None = None

    def applied_to(self, control: SpeculationControl) -> SpeculationControl:
        """`control` with what the rule says instead of its own."""
        count = self.num_speculative_tokens
        return replace(
            control,
            mode=control.mode if self.mode is None else self.mode,
            num_speculative_tokens=control.num_speculative_tokens if count is None else count,
            is_by_rule=True,
        )


def check_rules(rules: Sequence[SpeculationRule]) -> None:
    """Raises InvalidValueError, which names the rule by its index."""
    if len(rules) > MAX_RULES:
        raise InvalidValueError("rules", f"{len(rules)} rules", f"at most {MAX_RULES}")
    for index, rule in enumerate(rules):
        _check_rule(f"rules[{index}]", rule)
    for index, (before, after) in enumerate(pairwise(rules), 1):
        if after.min_requests_per_s <= before.min_requests_per_s:
            limit = f"above that of the rule before ({before.min_requests_per_s:g})"
            name = f"rules[{index}].min_requests_per_s"
            raise InvalidValueError(name, after.min_requests_per_s, limit)


def _check_rule(name: str, rule: SpeculationRule) -> None:
    rate = rule.min_requests_per_s
    if not is_number(rate) or not 0 <= rate <= MAX_REQUESTS_PER_S:
        limit = f"a number from 0 to {MAX_REQUESTS_PER_S:g}"
        raise InvalidValueError(f"{name}.min_requests_per_s", rate, limit)
    if rule.mode is None and rule.num_speculative_tokens is None:
        raise InvalidValueError(name, rule, "one with a mode, or num_speculative_tokens, or both")
    if rule.mode is not None and rule.mode not in SPECULATION_MODES:
        limit = f"one of {', '.join(SPECULATION_MODES)}"
        raise InvalidValueError(f"{name}.mode", rule.mode, limit)
    if rule.num_speculative_tokens is not None:
        field, count = f"{name}.num_speculative_tokens", rule.num_speculative_tokens
        require_count(field, count, MAX_NUM_SPECULATIVE_TOKENS)


def is_number(value: object) -> bool:
    """Whether it is an int or a float, and neither infinite nor none at all."""
    return type(value) in (int, float) and math.isfinite(cast("float", value))


def active_rule(
    rules: Sequence[SpeculationRule], requests_per_s: float, active: int | None
) -> int | None:
    """The index of the rule that holds; None for none. `active`: which did until now.

    A rule and those below it are left later than they are entered, so a rate around one of them
    does not make it flap.
    """
    holding = [
        index
        for index, rule in enumerate(rules)
        if requests_per_s >= rule.min_requests_per_s * _share(index, active)
    ]
    return holding[-1] if holding else None


def _share(index: int, active: int | None) -> float:
    return LEAVING_SHARE if active is not None and index <= active else 1.0
