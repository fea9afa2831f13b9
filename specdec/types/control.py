"""Speculation settings: their values, the rules on the request rate, and changes by operators."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from itertools import pairwise
from typing import Any, Literal, cast

from specdec.types.errors import InvalidValueError
from specdec.types.sampling.sampling_params import (
    MAX_NUM_SPECULATIVE_TOKENS,
    SERVED_VERIFIERS,
    VERIFIERS,
    VerifierName,
)
from specdec.types.validation import require_choice

SpeculationMode = Literal["auto", "on", "off"]
SPECULATION_MODES: tuple[SpeculationMode, ...] = ("auto", "on", "off")

MAX_SPECULATION_THRESHOLD = 4096
"""The largest batch an engine can be configured to run."""


@dataclass(frozen=True)
class SpeculationControl:
    """Speculation settings of an engine. With coupled verification they change no token.

    An engine holds the settings in force in one place (`Engine.control`); policy, scheduler and
    input processor read them there.

    mode: on and off apply at every load; auto goes by the threshold and, below it, by the policy.
    threshold: largest number of decoding requests for which mode auto drafts.
    num_speculative_tokens: draft length for requests that do not choose, and the most a
        policy may choose; 0 turns drafting off.
    method: drafts for requests that do not choose; None for all loaded methods, in their order.
    allow_request_override: whether requests may choose method and number, or opt out; for requests
        that arrive from then on, also draft_confidence_threshold.
    allowed_verifiers: verifiers that new requests may choose.
    is_by_rule: whether a rule on the request rate has set the mode.
    """

    mode: SpeculationMode
    threshold: int
    num_speculative_tokens: int
    method: str | None = None
    allow_request_override: bool = True
    allowed_verifiers: tuple[VerifierName, ...] = SERVED_VERIFIERS
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
    """Raise InvalidValueError unless `value` is an int from 0 to `high`."""
    if type(value) is not int or not 0 <= value <= high:  # to isinstance, True is an int
        raise InvalidValueError(name, value, f"a whole number from 0 to {high}")


NO_SPECULATION = SpeculationControl("off", threshold=0, num_speculative_tokens=0)
"""The settings of an engine that has nothing to draft with."""


MAX_RULES = 16
MAX_REQUESTS_PER_S = 1e6
LEAVING_SHARE = 0.8
"""The active rule stays active until the rate falls below this share of its threshold."""


@dataclass(frozen=True)
class RateRule:
    """Settings that apply from a request rate on; None leaves a setting unchanged."""

    min_requests_per_s: float
    mode: SpeculationMode | None = None
    num_speculative_tokens: int | None = None

    def applied_to(self, control: SpeculationControl) -> SpeculationControl:
        """Return `control` with the rule's settings in place."""
        own = {"mode": self.mode, "num_speculative_tokens": self.num_speculative_tokens}
        given: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
        return replace(control, **given, is_by_rule=self.mode is not None)


def check_rules(rules: Sequence[RateRule]) -> None:
    """Raise InvalidValueError, which names the rule by its index."""
    if len(rules) > MAX_RULES:
        raise InvalidValueError("rules", f"{len(rules)} rules", f"at most {MAX_RULES}")
    for index, rule in enumerate(rules):
        _check_rule(f"rules[{index}]", rule)
    for index, (before, after) in enumerate(pairwise(rules), 1):
        if after.min_requests_per_s <= before.min_requests_per_s:
            limit = f"above that of the rule before ({before.min_requests_per_s:g})"
            name = f"rules[{index}].min_requests_per_s"
            raise InvalidValueError(name, after.min_requests_per_s, limit)


def _check_rule(name: str, rule: RateRule) -> None:
    rate = rule.min_requests_per_s
    if not is_number(rate) or not 0 <= rate <= MAX_REQUESTS_PER_S:
        limit = f"a number from 0 to {MAX_REQUESTS_PER_S:.0f}"
        raise InvalidValueError(f"{name}.min_requests_per_s", rate, limit)
    if rule.mode is None and rule.num_speculative_tokens is None:
        raise InvalidValueError(name, rule, "one with a mode, or num_speculative_tokens, or both")
    require_choice(f"{name}.mode", rule.mode, SPECULATION_MODES)
    if rule.num_speculative_tokens is not None:
        field, count = f"{name}.num_speculative_tokens", rule.num_speculative_tokens
        require_count(field, count, MAX_NUM_SPECULATIVE_TOKENS)


def is_number(value: object) -> bool:
    """Return whether it is an int or a float, and neither infinite nor NaN."""
    return type(value) in (int, float) and math.isfinite(cast("float", value))


def active_rule(rules: Sequence[RateRule], requests_per_s: float, active: int | None) -> int | None:
    """Return the index of the active rule; None for none. active: the index until now.

    Hysteresis: a rule is left at a lower rate than it is entered, so that it does not flap.
    """
    holding = [
        index
        for index, rule in enumerate(rules)
        if requests_per_s >= rule.min_requests_per_s * _share(index, active)
    ]
    return holding[-1] if holding else None


def _share(index: int, active: int | None) -> float:
    return LEAVING_SHARE if active is not None and index <= active else 1.0


MAX_UPDATED_BY_CHARS = 128
MAX_REASON_CHARS = 256
MAX_AUDIT_PAGE = 200
DEFAULT_AUDIT_PAGE = 50

StateStamp = tuple[int, int | None]
"""Version and active rule of a state."""

CONTROL_VALUES = tuple(
    each.name for each in fields(SpeculationControl) if each.name != "is_by_rule"
)
"""Names of the settings that operators can change."""


MAX_TTL_S = 30 * 86400.0


@dataclass(frozen=True)
class SpeculationChange:
    """A change of the speculation settings. None leaves a setting as it is.

    The values are those of SpeculationControl. rules: replace all rules. ttl_s: seconds until
    all overrides end; 0 for never. reset: first removes all overrides. expected_version: the
    version that the change is for; None: any. updated_by, reason: who and why.
    """

    mode: SpeculationMode | None = None
    threshold: int | None = None
    num_speculative_tokens: int | None = None
    method: str | None = None
    allow_request_override: bool | None = None
    allowed_verifiers: tuple[VerifierName, ...] | None = None
    rules: tuple[RateRule, ...] | None = None
    ttl_s: float | None = None
    reset: bool = False
    expected_version: int | None = None
    updated_by: str = ""
    reason: str = ""

    def __post_init__(self) -> None:
        self.applied_to(NO_SPECULATION)
        check_rules(self.rules or ())
        ttl_s = self.ttl_s
        if ttl_s is not None and not (is_number(ttl_s) and 0 <= ttl_s <= MAX_TTL_S):
            raise InvalidValueError(
                "ttl_s", ttl_s, f"a number of seconds from 0 to {MAX_TTL_S:.0f}"
            )
        if not self.values and self.rules is None and self.ttl_s is None and not self.reset:
            names = (*CONTROL_VALUES, "rules", "ttl_s")
            limit = f"at least one of {', '.join(names)}, reset"
            raise InvalidValueError("change", {}, limit)
        _require_line("updated_by", self.updated_by, MAX_UPDATED_BY_CHARS)
        _require_line("reason", self.reason, MAX_REASON_CHARS)

    @property
    def values(self) -> dict[str, Any]:
        """Values of SpeculationControl that are set, by name."""
        values = {name: getattr(self, name) for name in CONTROL_VALUES}
        return {name: value for name, value in values.items() if value is not None}

    def applied_to(self, control: SpeculationControl) -> SpeculationControl:
        """Return `control` with the values that are set here. Raises InvalidValueError."""
        return replace(control, **self.values)


@dataclass(frozen=True)
class SpeculationState:
    """The speculation settings, and who made them.

    in_force: an operator's value if there is one, else the configured one; with the active rule
    applied. without_rules: without it. overridden: names of the values that an operator has set,
    rules included. version: counts the changes; 0 before the first, when updated_at is None.
    active_rule: index of the rule in force. expires_at: when the overrides end; None for never.
    """

    in_force: SpeculationControl
    without_rules: SpeculationControl
    configured: SpeculationControl
    overridden: tuple[str, ...]
    version: int
    updated_at: datetime | None
    updated_by: str
    reason: str
    rules: tuple[RateRule, ...] = ()
    active_rule: int | None = None
    expires_at: datetime | None = None

    def describe(self) -> str:
        """Return the settings in force in one line for the log."""
        control = self.in_force
        text = f"version {self.version}: mode {control.mode}, threshold {control.threshold}, "
        text += f"{control.num_speculative_tokens} draft tokens, method {control.method or 'any'}"
        rule = "" if self.active_rule is None else f", by rule {self.active_rule}"
        return f"{text}{rule}{self.updated_by and f', set by {self.updated_by}'}"

    @property
    def stamp(self) -> StateStamp:
        """Key of the state: replicas apply two states with the same key alike."""
        return self.version, self.active_rule


@dataclass(frozen=True)
class SpeculationPreview:
    """The effect of a change at the present load.

    requests_per_s, num_decoding: over all replicas. in_force: with the rule that would be active.
    active_rule: its index.
    """

    requests_per_s: float
    num_decoding: int
    in_force: SpeculationControl
    active_rule: int | None


@dataclass(frozen=True)
class AuditEntry:
    """One change: the version that it created, when, who, why, and the values by name."""

    version: int
    at: datetime
    updated_by: str
    reason: str
    change: Mapping[str, Any]


@dataclass(frozen=True)
class AuditPage:
    """Changes, the newest first. next_page_token: empty on the last page."""

    entries: tuple[AuditEntry, ...]
    next_page_token: str


def _require_line(name: str, text: str, max_chars: int) -> None:
    if len(text) > max_chars or not text.isprintable():
        raise InvalidValueError(name, text, f"at most {max_chars} printable characters")
