"""What an operator makes depend on the rate at which requests arrive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

from specdec.errors import InvalidValueError
from specdec.sampling_params import MAX_NUM_SPECULATIVE_TOKENS
from specdec.speculation_control import (
    SPECULATION_MODES,
    SpeculationControl,
    SpeculationMode,
    require_count,
)

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
