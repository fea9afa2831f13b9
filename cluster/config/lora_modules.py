"""LoRA adapters that a service loads when it starts, in the forms that vLLM accepts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.config.fields import Limit, optional
from specdec.types.adapters import AdapterOrder
from specdec.types.errors import InvalidValueError

_TEXT = (
    'adapters such as name=path,name=path or {"name": "sql", "path": "/adapters/sql"}, each with '
    "another name"
)


def read_lora_modules(value: object) -> tuple[AdapterOrder, ...]:
    """Return the orders to load adapters.

    value: text of pairs name=path, separated by commas, or of JSON objects with name and path; a
    list of either; a mapping from names to paths. None for none. An existing path becomes absolute.

    Raises InvalidValueError.
    """
    pairs = [] if value is None else _pairs(value)
    orders = tuple(AdapterOrder.load(name, _absolute(path)) for name, path in pairs)
    names = [each.name for each in orders]
    if len(set(names)) < len(names):
        raise InvalidValueError("lora_modules", value, _TEXT)
    return orders


def canonical_lora_modules(value: object) -> str | None:
    """Return a value as JSON text with absolute paths; None for no adapters."""
    modules = [{"name": each.name, "path": each.path} for each in read_lora_modules(value)]
    return json.dumps(modules) if modules else None


def _pairs(value: object) -> list[tuple[str, str]]:
    if isinstance(value, str):
        return _pairs_in_text(value.strip())
    if isinstance(value, list | tuple):
        return [pair for each in value for pair in _pairs_of_entry(each)]
    if isinstance(value, Mapping):
        return [*value.items()]
    raise InvalidValueError("lora_modules", value, _TEXT)


def _pairs_of_entry(entry: object) -> list[tuple[str, str]]:
    """Return the pairs of one entry of a list: an object of vLLM, or text."""
    return [_pair_of(entry)] if isinstance(entry, Mapping) else _pairs(entry)


def _pairs_in_text(text: str) -> list[tuple[str, str]]:
    if text.startswith(("{", "[")):
        try:
            return _pairs(json.loads(text if text.startswith("[") else f"[{text}]"))
        except (ValueError, RecursionError) as error:
            raise InvalidValueError("lora_modules", text, _TEXT) from error
    parts = [each.strip().partition("=") for each in text.split(",")]
    if not all(name and equals and path for name, equals, path in parts):
        raise InvalidValueError("lora_modules", text, _TEXT)
    return [(name, path) for name, _, path in parts]


def _pair_of(module: Mapping[str, Any]) -> tuple[str, str]:
    """Return name and path of vLLM's object; its `base_model_name` has no effect here."""
    unknown = module.keys() - {"name", "path", "base_model_name"}
    if unknown or not all(isinstance(module.get(each), str) for each in ("name", "path")):
        raise InvalidValueError("lora_modules", dict(module), _TEXT)
    return module["name"], module["path"]


def _absolute(path: object) -> str:
    if not isinstance(path, str):
        raise InvalidValueError("lora_modules", path, _TEXT)
    found = Path(path).expanduser()
    return str(found.absolute()) if path and found.exists() else path


def _is_readable(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(read_lora_modules(value))
    except InvalidValueError:
        return False


LORA_MODULES = optional(Limit(_TEXT, _is_readable))
