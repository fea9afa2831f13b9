"""LoRA adapters that a service loads when it starts, in the forms that vLLM accepts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from specdec.config.fields import Limit, optional
from specdec.types.adapters import AdapterOrder
from specdec.types.errors import InvalidValueError
from specdec.types.validation import unique_keys

_TEXT = (
    'adapters such as name=path,name=path or {"name": "sql", "path": "/adapters/sql"}, each with '
    "another name"
)


def read_lora_modules(value: object) -> tuple[AdapterOrder, ...]:
    """Return the orders to load adapters.

    value: text of pairs name=path, separated by commas, or of JSON objects with name and path or
    draft_path or both; a list of either; a mapping from names to paths. None for none. An existing
    path becomes absolute.

    Raises InvalidValueError.
    """
    modules = [] if value is None else _modules(value)
    orders = tuple(
        AdapterOrder.load(name, _absolute(path), draft_path=_absolute(draft_path))
        for name, path, draft_path in modules
    )
    names = [each.name for each in orders]
    if len(set(names)) < len(names):
        raise InvalidValueError("lora_modules", value, _TEXT)
    return orders


def canonical_lora_modules(value: object) -> str | None:
    """Return a value as JSON text with absolute paths; None for no adapters."""
    modules = [
        {"name": each.name}
        | {name: path for name in ("path", "draft_path") if (path := getattr(each, name))}
        for each in read_lora_modules(value)
    ]
    return json.dumps(modules) if modules else None


class _Module(NamedTuple):
    """An adapter as it is written: its name and paths, which may be of any type."""

    name: Any
    path: Any
    draft_path: Any = ""


def _modules(value: object) -> list[_Module]:
    if isinstance(value, str):
        return _modules_in_text(value.strip())
    if isinstance(value, list | tuple):
        return [module for each in value for module in _modules_of_entry(each)]
    if isinstance(value, Mapping):
        return [_Module(name, path) for name, path in value.items()]
    raise InvalidValueError("lora_modules", value, _TEXT)


def _modules_of_entry(entry: object) -> list[_Module]:
    """Return the modules of one entry of a list: an object of vLLM, or text."""
    return [_module_of(entry)] if isinstance(entry, Mapping) else _modules(entry)


def _modules_in_text(text: str) -> list[_Module]:
    if text.startswith(("{", "[")):
        try:
            listed = text if text.startswith("[") else f"[{text}]"
            return _modules(json.loads(listed, object_pairs_hook=unique_keys))
        except (ValueError, RecursionError) as error:
            raise InvalidValueError("lora_modules", text, _TEXT) from error
    parts = [each.strip().partition("=") for each in text.split(",")]
    if not all(name and equals and path for name, equals, path in parts):
        raise InvalidValueError("lora_modules", text, _TEXT)
    return [_Module(name, path) for name, _, path in parts]


def _module_of(module: Mapping[str, Any]) -> _Module:
    """Return vLLM's object; its `base_model_name` has no effect, and `draft_path` is not vLLM's."""
    unknown = module.keys() - {"name", "path", "draft_path", "base_model_name"}
    if unknown or not isinstance(module.get("name"), str):
        raise InvalidValueError("lora_modules", dict(module), _TEXT)
    return _Module(module["name"], module.get("path", ""), module.get("draft_path", ""))


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
