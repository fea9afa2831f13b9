"""Messages of AdminService: changes of the speculation settings, and their state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any

from specdec.types.control import (
    RateRule,
    SpeculationControl,
    SpeculationMode,
    check_rules,
    is_number,
)
from specdec.types.errors import InvalidValueError
from specdec.types.sampling_params import VerifierName

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
_NEUTRAL = SpeculationControl("auto", threshold=0, num_speculative_tokens=0)


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
        self.applied_to(_NEUTRAL)
        check_rules(self.rules or ())
        ttl_s = self.ttl_s
        if ttl_s is not None and not (is_number(ttl_s) and 0 <= ttl_s <= MAX_TTL_S):
            raise InvalidValueError("ttl_s", ttl_s, f"a number of seconds from 0 to {MAX_TTL_S:g}")
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
