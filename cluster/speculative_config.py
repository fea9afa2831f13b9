"""How `speculative_config` is read: a mapping, JSON text, auto or none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from cluster.settings import Limit, refuse_unknown
from specdec.errors import InvalidValueError

if TYPE_CHECKING:
    from specdec.config import SpeculativeConfig

# specdec.config loads torch, which takes seconds. The command line reads the settings whatever it
# is asked for, so that module is imported only where a configuration is made.

AUTO = "auto"

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def _is_speculation(value: object) -> bool:
    from specdec.config import SpeculativeConfig

    return value is None or isinstance(value, SpeculativeConfig)


SPECULATION = Limit("a mapping, auto, or none to turn speculation off", _is_speculation)


def default_speculation(model: str, device: str) -> SpeculativeConfig:
    """What `auto` stands for: a copy of an alias's model that drafts for it, else n-grams."""
    from specdec.config import SpeculativeConfig, has_quantization
    from specdec.models.store import ALIASES

    can_quantize = device == "cpu" and has_quantization()
    if model in ALIASES and ALIASES[model].drafts_for_itself and can_quantize:
        return SpeculativeConfig("draft_model", quantization="int8")
    return SpeculativeConfig("ngram")


def read_speculation(value: object) -> SpeculativeConfig | None:
    """`value` is a mapping, the same as JSON text, or none as a word or as None."""
    from specdec.config import SpeculativeConfig

    if value == AUTO:
        return cast("SpeculativeConfig", AUTO)
    if value is None or value == "none":
        return None
    mapping = _parse_json(value) if isinstance(value, str) else value
    if not isinstance(mapping, Mapping):
        raise InvalidValueError("speculative_config", value, SPECULATION.text)
    known = [each.name for each in fields(SpeculativeConfig)]
    refuse_unknown("speculative_config key", mapping, known)
    types = get_type_hints(SpeculativeConfig)
    values = {
        name: _read_value(f"speculative_config.{name}", value, types[name])
        for name, value in mapping.items()
    }
    return SpeculativeConfig(**values)


def _read_value(name: str, value: object, expected: Any) -> Any:
    """A value as a field of type `expected` takes it: of a list, a tuple.

    Only the kind of value is judged here; its range is SpeculativeConfig's own affair.
    """
    if get_origin(expected) is tuple:
        if not isinstance(value, list | tuple):
            raise InvalidValueError(name, value, "a list")
        item = get_args(expected)[0]
        return tuple(_read_value(f"{name}[{i}]", each, item) for i, each in enumerate(value))
    is_union = get_origin(expected) in (Union, UnionType)
    allowed = get_args(expected) if is_union else (expected,)
    kinds = {str if get_origin(each) is Literal else each for each in allowed}
    is_whole_for_number = float in kinds and type(value) is int
    if type(value) not in kinds and not is_whole_for_number:  # to isinstance, True is an int
        raise InvalidValueError(name, value, " or ".join(_WORDS[k] for k in _WORDS if k in kinds))
    return value


def _parse_json(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        limit = f"a JSON mapping, or none ({error})"
        raise InvalidValueError("speculative_config", text, limit) from error
