"""The methods of speculative_config by role, from flat keys or from objects with their own keys.

A role is a name, whose keys stand beside it, or an object such as {"method": "draft_model",
"model": "./small"}. Methods with the same keys, as a head and a draft model, need an object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from specdec.config.fields import refuse_unknown
from specdec.config.speculation.head_methods import HeadMethodConfig
from specdec.config.speculation.method_config import MethodConfig
from specdec.config.speculation.methods import METHODS, DraftModelConfig, NgramConfig, keys_of
from specdec.types.errors import InvalidValueError

OTHER_ROLES = ("first", "fallback")
"""The roles beside `method`, in the order in which they are read."""

Given = str | Mapping[str, Any] | None
"""A role as it is given: a name, an object, or nothing."""


def default_method(keys: Mapping[str, Any]) -> str:
    """Return ngram unless `keys` have a model and no other role for it, else draft_model.

    A key that only one method with a model has, such as medusa_choices, decides for that one.
    """
    others = (keys.get(role) for role in OTHER_ROLES)
    if keys.get("model") is None or any(map(_takes_model, others)):
        return NgramConfig.name
    for key in keys:
        owners = [each for each in METHODS.values() if key in keys_of(each)]
        if len(owners) == 1 and "model" in keys_of(owners[0]):
            return owners[0].name
    return DraftModelConfig.name


def read_roles(roles: Mapping[str, Given], keys: Mapping[str, Any]) -> dict[str, MethodConfig]:
    """Return the configuration of each role that is given.

    keys: the flat ones. Raises InvalidValueError, also for a flat key without an effect.
    """
    given = {role: value for role, value in roles.items() if value is not None}
    flat = {
        role: _with_keys(_named(role, value), keys)
        for role, value in given.items()
        if not isinstance(value, Mapping)
    }
    _require_distinct_keys(flat)
    _refuse_keys_of_others(flat, keys)
    nested = {
        role: _read_object(role, value)
        for role, value in given.items()
        if isinstance(value, Mapping)
    }
    return {**flat, **nested}


def check_roles(roles: Mapping[str, MethodConfig]) -> None:
    """Raise InvalidValueError for a method, or a head, in two roles."""
    role_of: dict[str, str] = {}
    for role, each in roles.items():
        if each.name in role_of:
            limit = f"another method than {role_of[each.name]}, since each drafts once"
            raise InvalidValueError(f"speculative_config.{role}", each.name, limit)
        heads = [name for name in role_of if issubclass(METHODS[name], HeadMethodConfig)]
        if heads and isinstance(each, HeadMethodConfig):
            limit = f"another method than a head, since the target's ranks load one ({heads[0]})"
            raise InvalidValueError(f"speculative_config.{role}", each.name, limit)
        role_of[each.name] = role


def role_mapping(roles: Mapping[str, MethodConfig]) -> dict[str, Any]:
    """Return keys that `read_roles` reads: flat ones, and objects where methods share keys."""
    mapping: dict[str, Any] = dict.fromkeys(OTHER_ROLES)
    flat: dict[str, Any] = {}
    for role, each in roles.items():
        own = asdict(each)
        if flat.keys() & own.keys():
            mapping[role] = {"method": each.name, **own}
        else:
            mapping[role] = each.name
            flat |= own
    return mapping | flat


def _takes_model(given: Given) -> bool:
    return isinstance(given, str) and given in METHODS and "model" in keys_of(METHODS[given])


def _named(role: str, name: object) -> type[MethodConfig]:
    if not isinstance(name, str) or name not in METHODS:
        suffix = "" if role == "method" else ", or left out"
        limit = f"one of {', '.join(METHODS)}{suffix}"
        raise InvalidValueError(f"speculative_config.{role}", name, limit)
    return METHODS[name]


def _with_keys(config_class: type[MethodConfig], keys: Mapping[str, Any]) -> MethodConfig:
    return config_class(**{key: keys[key] for key in keys_of(config_class) if key in keys})


def _read_object(role: str, given: Mapping[str, Any]) -> MethodConfig:
    field = f"speculative_config.{role}"
    if "method" not in given:
        raise InvalidValueError(field, dict(given), "an object with the key method")
    config_class = _named(f"{role}.method", given["method"])
    own = {name: value for name, value in given.items() if name != "method"}
    refuse_unknown(f"{field} key", own, keys_of(config_class))
    try:
        return config_class(**own)
    except InvalidValueError as error:
        name = error.field.replace("speculative_config", field, 1)
        raise InvalidValueError(name, error.value, error.limit) from None


def _require_distinct_keys(flat: Mapping[str, MethodConfig]) -> None:
    before: list[MethodConfig] = []
    for role, each in flat.items():
        for other in before:
            shared = set(keys_of(type(other))) & set(keys_of(type(each)))
            if shared and other.name != each.name:
                limit = (
                    f"a method without the key {min(shared)}, which is of {other.name}, or an "
                    f'object with its own keys: {{"method": "{each.name}", ...}}'
                )
                raise InvalidValueError(f"speculative_config.{role}", each.name, limit)
        before.append(each)


def _refuse_keys_of_others(flat: Mapping[str, MethodConfig], keys: Mapping[str, Any]) -> None:
    """Refuse rather than ignore keys that have no effect."""
    used = {key for each in flat.values() for key in keys_of(type(each))}
    for key in (each for each in keys if each not in used):
        owners = [each for each in METHODS.values() if key in keys_of(each)]
        if keys[key] != getattr(owners[0], key):
            names = " or ".join(each.name for each in owners)
            limit = f"left out unless method, first or fallback is {names}"
            raise InvalidValueError(f"speculative_config.{key}", keys[key], limit)
