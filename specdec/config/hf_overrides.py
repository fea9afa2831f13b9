"""`hf_overrides`: keys in place of those of a model's config.json, by vLLM's name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specdec.config.fields import Limit, optional

_STORED = "quantization_config"
"""It describes the tensors of the files, which an override cannot change."""

_ROPE_SPELLINGS = ("rope_parameters", "rope_scaling")
"""The same settings in two spellings, of which a file may have the other one."""


def _read(value: object) -> dict[str, Any] | None:
    """Return the keys of a mapping or of JSON text; None for anything else."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        return None
    return None if _STORED in value else dict(value)


HF_OVERRIDES = optional(
    Limit(
        f'a JSON object such as {{"rope_theta": 1e6}}, without {_STORED}',
        lambda value: _read(value) is not None,
    )
)


def canonical_overrides(value: object) -> str | None:
    """Return valid overrides as JSON text; None for no keys."""
    found = _read(value)
    return json.dumps(found, sort_keys=True) if found else None


def with_overrides(raw: Mapping[str, Any], overrides: str | None) -> dict[str, Any]:
    """Return a config.json with other keys; those of its text_config are merged into it.

    overrides: as returned by `canonical_overrides`. An override of the rotary embedding replaces
    its other spelling, but keeps rope_theta unless it has one.
    """
    changed, keys = dict(raw), json.loads(overrides) if overrides else {}
    for name in _ROPE_SPELLINGS if set(_ROPE_SPELLINGS) & keys.keys() else ():
        found = changed.pop(name, None) or {}
        if "rope_theta" in found:
            changed["rope_theta"] = found["rope_theta"]
    for key, value in keys.items():
        is_nested = key == "text_config" and isinstance(changed.get(key), dict)
        changed[key] = with_overrides(changed[key], json.dumps(value)) if is_nested else value
    return changed


def unknown_keys(raw: Mapping[str, Any], overrides: str | None) -> list[str]:
    """Return the keys of overrides that a config.json lacks: they may be misspelled."""
    keys = json.loads(overrides) if overrides else {}
    known = {*raw, *_ROPE_SPELLINGS, "rope_theta"}
    return sorted(key for key in keys if key not in known)
