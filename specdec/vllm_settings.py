"""Reads settings that are told in vLLM's words, or in those of old texts about it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdec.devices import resolved_device
from specdec.errors import InvalidValueError
from specdec.settings import TEXT, shown_value
from specdec.speculative_keys import (
    AUTO,
    SPECULATION_KEYS,
    as_mapping,
    default_speculation,
)
from specdec.vllm_words import REFUSED_VALUES, VALUES, Always, Words

_DECIDES_METHOD = frozenset({"method", "model"})
_LOOKUP_KEYS = frozenset({"prompt_lookup_min", "prompt_lookup_max"})

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Told:
    """What one source says. speculation: keys of speculative_config that it names by themselves."""

    settings: Mapping[str, Any]
    speculation: Mapping[str, Any]


def in_our_words(
    words: Words, *sources: Mapping[Any, Any], model: str = "", device: str = "cpu"
) -> dict[str, Any]:
    """Settings under our names; a later source wins, of speculation key by key.

    words: of the surface. model, device: what is served unless a source says so, which decides how
    to draft where only details of it are told. Raises InvalidValueError for what is told twice in
    one source, and for what there is not here, with what to write instead.
    """
    told = [_read(words, source) for source in sources]
    settings: dict[str, Any] = {}
    for each in told:
        settings |= each.settings
    if any(each.speculation for each in told):
        served = {"model": model, "device": device, "quantization": "none"} | settings
        settings["speculative_config"] = _speculation(told, served)
    return settings


def value_in_our_words(name: str, value: Any) -> Any:
    """A value of the setting under our name for it. Raises InvalidValueError."""
    if not isinstance(value, str):
        return value
    if (limit := REFUSED_VALUES.get(name, {}).get(value)) is not None:
        raise InvalidValueError(name, value, limit)
    return VALUES.get(name, {}).get(value, value)


def _read(words: Words, source: Mapping[Any, Any]) -> _Told:
    settings: dict[str, Any] = {}
    speculation: dict[str, Any] = {}
    for key, value in source.items():
        name = key.replace("-", "_") if isinstance(key, str) else key
        if name in words.not_here:
            raise InvalidValueError(key, shown_value(name, value), words.not_here[name])
        if name in words.always:
            _check_always(name, value, words.always[name])
        elif name in SPECULATION_KEYS:
            _put(speculation, SPECULATION_KEYS[name], name, value)
        else:
            _put(settings, words.renamed.get(name, name), name, value)
    return _Told(settings, speculation)


def _put(values: dict[str, Any], ours: Any, name: Any, value: Any) -> None:
    if ours in values:
        raise InvalidValueError(name, value, f"left out where {ours} is given, too")
    values[ours] = value_in_our_words(name, value)


def _check_always(name: str, value: Any, always: Always) -> None:
    only, reason, synonyms = always
    is_it = value == only and isinstance(value, bool) == isinstance(only, bool)  # True equals 1
    if not is_it and value not in synonyms:
        spelled = str(only).lower() if isinstance(only, bool) else only
        raise InvalidValueError(name, value, f"{spelled}, or left out: {reason}")
    logger.warning("%s is so without being told: %s", name, reason)


def _speculation(told: list[_Told], served: Mapping[str, Any]) -> dict[str, Any] | None:
    """The last speculative_config, with the keys that are told beside it or after it."""
    base = as_mapping(AUTO)
    keys: dict[str, Any] = {}
    for each in told:
        if "speculative_config" in each.settings:
            base, keys = as_mapping(each.settings["speculative_config"]), {}
            _refuse_second(each.speculation, base)
        keys |= each.speculation
    if base is None:
        for key, value in keys.items():
            limit = "left out where speculative_config is none"
            raise InvalidValueError(f"speculative_config.{key}", value, limit)
        return None
    return {**(_default(keys, served) if base == AUTO else base), **keys}


def _refuse_second(keys: Mapping[str, Any], base: object) -> None:
    for key, value in keys.items():
        if isinstance(base, Mapping) and key in base:
            limit = "left out beside a speculative_config that has it"
            raise InvalidValueError(f"speculative_config.{key}", value, limit)


def _default(keys: Mapping[str, Any], served: Mapping[str, Any]) -> dict[str, Any]:
    """What auto stands for, as far as the keys leave that open."""
    if _DECIDES_METHOD & keys.keys():
        return {}
    if _LOOKUP_KEYS & keys.keys():
        return {"method": "ngram"}
    model, device, quantization = (served[name] for name in ("model", "device", "quantization"))
    for name in ("model", "device"):
        if not isinstance(served[name], str):
            raise InvalidValueError(name, served[name], TEXT.text)
    default = default_speculation(model, resolved_device(device), quantization)
    quantization = {"quantization": default.quantization} if default.quantization else {}
    return {"method": default.method, **quantization}
