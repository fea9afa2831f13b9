"""`hf_overrides`: keys in place of those of a model's config.json, by vLLM's name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specdec.config.fields import Limit, optional

_STORED = "quantization_config"
"""It describes the tensors of the files, which an override cannot change."""

_NESTED = "text_config"

_ROPE_SPELLINGS = ("rope_parameters", "rope_scaling")
"""Two names of the same settings; a file may use either."""

_ROPE_KEYS = ("rope_theta", "partial_rotary_factor")
"""Settings that a file has either in one of these or at its top level."""


def _read(value: object) -> dict[str, Any] | None:
    """Return the keys of JSON text, or of a mapping that has one; None for anything else."""
    if isinstance(value, Mapping) and not all(isinstance(key, str) for key in value):
        return None
    try:
        found = json.loads(value if isinstance(value, str) else json.dumps(value, default=dict))
    except (TypeError, ValueError, RecursionError):
        return None
    objects = [found, found.get(_NESTED, {})] if isinstance(found, dict) else [found]
    is_valid = all(isinstance(each, dict) and _STORED not in each for each in objects)
    return found if is_valid else None


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
    its other spelling, but keeps rope_theta and partial_rotary_factor unless it has them.
    """
    keys = json.loads(overrides) if overrides else {}
    changed = _without_replaced(raw, keys)
    for key, value in keys.items():
        is_nested = key == _NESTED and isinstance(changed.get(key), dict)
        changed[key] = with_overrides(changed[key], json.dumps(value)) if is_nested else value
    return changed


def _without_replaced(raw: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json without the settings of the rotary embedding that `keys` replace.

    One that is kept moves to the top level, where a spelling in `keys` has precedence over it.
    """
    changed, replaced = dict(raw), [key for key in _ROPE_KEYS if key in keys]
    for name in _ROPE_SPELLINGS:
        stored = changed.get(name)
        own = stored if isinstance(stored, dict) else {}
        if any(each in keys for each in _ROPE_SPELLINGS):
            changed.pop(name, None)
            changed |= {key: own[key] for key in _ROPE_KEYS if key in own}
        elif own:
            changed[name] = {key: own[key] for key in own if key not in replaced}
    return changed


def unknown_keys(raw: Mapping[str, Any], overrides: str | None) -> list[str]:
    """Return the keys of overrides that a config.json lacks: they may be misspelled."""
    keys = json.loads(overrides) if overrides else {}
    known = {*raw, *_ROPE_SPELLINGS, "rope_theta"}
    return sorted(key for key in keys if key not in known)
