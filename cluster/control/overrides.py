"""Applies the operators' stored settings to the configured ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from cluster.control.store import StoredSpeculation
from specdec.types.control import (
    CONTROL_VALUES,
    NO_SPECULATION,
    RateRule,
    SpeculationChange,
    SpeculationControl,
    SpeculationState,
)
from specdec.types.errors import InvalidValueError
from specdec.types.sampling.sampling_params import SERVED_VERIFIERS, VerifierName

_RULES = "rules"


@dataclass(frozen=True)
class OverrideLimits:
    """Limits of what operators can set: loaded methods, the service's verifier and the others."""

    methods: tuple[str, ...] = ()
    verifier: VerifierName = "coupled"
    verifiers: tuple[VerifierName, ...] = SERVED_VERIFIERS

    def check(self, change: SpeculationChange) -> None:
        """Raise InvalidValueError for a method or verifiers that this service lacks."""
        if change.method is not None and not self.has_method(change.method):
            several = f"one of those loaded: {', '.join(self.methods)}"
            limit = several if len(self.methods) > 1 else "left out: one method alone is loaded"
            raise InvalidValueError("method", change.method, limit)
        names = change.allowed_verifiers
        if names is not None and self.verifier not in names:
            limit = f"a list with {self.verifier} in it, the service's own"
            raise InvalidValueError("allowed_verifiers", names, limit)
        if "synthetic" in (names or ()) and "synthetic" not in self.verifiers:
            limit = "a list without synthetic, which speculative_config does not allow"
            raise InvalidValueError("allowed_verifiers", names, limit)

    def has_method(self, method: str) -> bool:
        """Return whether several methods are loaded and this is one of them."""
        return len(self.methods) > 1 and method in self.methods

    def still_valid(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Return the overrides that apply to what is loaded; the others stay stored."""
        left_out = set()
        if "method" in overrides and not self.has_method(overrides["method"]):
            left_out.add("method")
        names = overrides.get("allowed_verifiers", (self.verifier,))
        is_synthetic = "synthetic" in names and "synthetic" not in self.verifiers
        if self.verifier not in names or is_synthetic:
            left_out.add("allowed_verifiers")
        return {name: value for name, value in overrides.items() if name not in left_out}


def after_change(
    before: StoredSpeculation, change: SpeculationChange, now_s: float
) -> StoredSpeculation:
    """Return the version after a change. now_s: seconds since 1970."""
    kept = {} if change.reset else dict(before.overrides)
    expires_at_s = None if change.reset else before.expires_at_s
    if change.ttl_s is not None:
        expires_at_s = now_s + change.ttl_s if change.ttl_s else None
    overrides = {**kept, **_plain_values(change)}
    if not overrides.get(_RULES, True):
        del overrides[_RULES]
    return StoredSpeculation(
        version=before.version + 1,
        overrides=overrides,
        updated_at_s=now_s,
        updated_by=change.updated_by,
        reason=change.reason,
        expires_at_s=expires_at_s,
    )


def plain_change(change: SpeculationChange) -> dict[str, Any]:
    """Return the settings of a change for the audit log."""
    plain = _plain_values(change)
    if change.ttl_s is not None:
        plain["ttl_s"] = change.ttl_s
    return {"reset": True, **plain} if change.reset else plain


def state_of(
    stored: StoredSpeculation,
    configured: SpeculationControl | None,
    limits: OverrideLimits,
    active: int | None,
) -> SpeculationState:
    """Return the state with these overrides. active: index of the active rule."""
    overrides = limits.still_valid(stored.overrides)
    if configured is None:  # overrides stay stored until the service can draft again
        configured, overrides = NO_SPECULATION, {}
    rules = tuple(RateRule(**each) for each in overrides.get(_RULES, ()))
    active = active if active is not None and active < len(rules) else None
    given = {name: overrides[name] for name in CONTROL_VALUES if name in overrides}
    values: dict[str, Any] = {
        name: tuple(each) if isinstance(each, list) else each for name, each in given.items()
    }
    in_force = replace(configured, **values)
    return SpeculationState(
        in_force=in_force if active is None else rules[active].applied_to(in_force),
        without_rules=in_force,
        configured=configured,
        overridden=tuple(name for name in (*CONTROL_VALUES, _RULES) if name in overrides),
        version=stored.version,
        updated_at=_moment(stored.updated_at_s) if stored.version else None,
        updated_by=stored.updated_by,
        reason=stored.reason,
        rules=rules,
        active_rule=active,
        expires_at=None if stored.expires_at_s is None else _moment(stored.expires_at_s),
    )


def _plain_values(change: SpeculationChange) -> dict[str, Any]:
    plain = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in change.values.items()
    }
    if change.rules is not None:
        plain[_RULES] = [asdict(rule) for rule in change.rules]
    return plain


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
