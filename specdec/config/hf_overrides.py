"""`hf_overrides`: keys in place of those of a model's config.json, by vLLM's name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.config.fields import Limit, optional
from specdec.types.validation import unique_keys

_STORED = "quantization_config"
"""It describes the tensors of the files, which an override cannot change."""

_NESTED = "text_config"

_ROPE_SPELLINGS = ("rope_parameters", "rope_scaling")
"""Two names of the same settings; a file may use either."""

_ROPE_KEYS = ("rope_theta", "partial_rotary_factor")
"""Settings that a file has either in one of these or at its top level."""

_FULL, _SLIDING = "full_attention", "sliding_attention"
"""Keys of rope_parameters that are nested by the type of a layer (Gemma 3, OLMo 3)."""

_LOCAL_THETA = "rope_local_base_freq"
"""The older name of the base of layers with a window, at the top level."""


def _read(value: object) -> dict[str, Any] | None:
    """Return the keys of JSON text, or of a mapping that has one; None for anything else."""
    if isinstance(value, Mapping) and not all(isinstance(key, str) for key in value):
        return None
    try:
        text = value if isinstance(value, str) else json.dumps(value, default=dict)
        found = json.loads(text, object_pairs_hook=unique_keys)
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
    its other spelling, but keeps rope_theta and partial_rotary_factor unless it has them. Where
    either is nested by the type of a layer, types without an override stay as they are.
    """
    keys = json.loads(overrides) if overrides else {}
    given = [keys[name] for name in _ROPE_SPELLINGS if name in keys]
    if _is_by_layer_type(raw.get("rope_parameters")) or any(map(_is_by_layer_type, given)):
        by_type = _overridden_by_layer_type(raw, keys, given)
        raw, keys = (
            {name: each[name] for name in each if name not in _ROPE_SPELLINGS}
            for each in (raw, keys)
        )
        changed = {**raw, "rope_parameters": by_type}
    else:
        changed = _without_replaced(raw, keys)
    for key, value in keys.items():
        is_nested = key == _NESTED and isinstance(changed.get(key), dict)
        changed[key] = with_overrides(changed[key], json.dumps(value)) if is_nested else value
    return changed


def _is_by_layer_type(parameters: object) -> bool:
    return isinstance(parameters, dict) and not {_FULL, _SLIDING}.isdisjoint(parameters)


def _overridden_by_layer_type(
    raw: Mapping[str, Any], keys: Mapping[str, Any], given: Sequence[Any]
) -> dict[str, dict[str, Any]]:
    """Return the rotary embedding by type of layer. given: the overrides of its parameters.

    Parameters that are not nested are those of full attention, as in older files. A base at the top
    level is also that of other types with the same base.
    """
    stored = raw.get("rope_parameters")
    if not _is_by_layer_type(stored):
        stored = {_FULL: raw.get("rope_scaling") or stored}
    assert isinstance(stored, dict), "parameters by type, as found or as made above"
    found = {kind: dict(stored.get(kind) or {}) for kind in (_FULL, _SLIDING)}
    if "rope_theta" in keys:
        base = found[_FULL].get("rope_theta")
        for parameters in found.values():
            if parameters.get("rope_theta") == base:
                parameters["rope_theta"] = keys["rope_theta"]
    if _LOCAL_THETA in keys:
        found[_SLIDING]["rope_theta"] = keys[_LOCAL_THETA]
    for each in given:
        for kind, changes in (each if _is_by_layer_type(each) else {_FULL: each}).items():
            before = found.get(kind, {})
            kept = {key: before[key] for key in _ROPE_KEYS if key in before}
            found[kind] = kept | (changes or {})
    return found


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
    if _is_by_layer_type(raw.get("rope_parameters")):
        known.add(_LOCAL_THETA)
    return sorted(key for key in keys if key not in known)
