"""Checks of the fields of frozen dataclasses.

All of them raise InvalidValueError, which names the field, the value and the limit; except for
`unique_keys`, which checks JSON while it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import lru_cache
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from specdec.types.errors import InvalidValueError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

VALID_UNICODE = "valid Unicode, without lone surrogates"
"""The limit in errors about text for which `is_valid_unicode` is false."""


def check_types(record: DataclassInstance, prefix: str = "") -> None:
    """Check the type of every field, and replace lists by tuples in place.

    prefix: of the fields' names in errors. An int is accepted for a float, a bool for neither, and
    any str for a Literal. Annotations may be classes, Literals, tuples of any length, Mappings, and
    unions.
    """
    for name, (always, containers, kinds) in _kinds(type(record)).items():
        value = getattr(record, name)
        given = type(value)
        if given in always or (given in containers and not value):
            continue
        if isinstance(value, list):
            value = tuple(value)
            object.__setattr__(record, name, value)
        if not any(_fits(value, kind) for kind in kinds):
            limit = f"of type {' or '.join(dict.fromkeys(map(_type_name, kinds)))}"
            raise InvalidValueError(f"{prefix}{name}", value, limit)


def check_text(name: str, text: str | None, max_chars: int) -> None:
    """Reject text that is empty, too long or not valid Unicode; None passes."""
    if text is None:
        return
    if not 1 <= len(text) <= max_chars:
        raise InvalidValueError(name, text, f"1 to {max_chars} characters")
    if not is_valid_unicode(text):
        raise InvalidValueError(name, text, VALID_UNICODE)


def check_texts(name: str, texts: tuple[str, ...], most: int, max_chars: int) -> None:
    """Reject too many texts, or one that `check_text` rejects."""
    if len(texts) > most:
        raise InvalidValueError(name, texts, f"at most {most} strings")
    for index, text in enumerate(texts):
        check_text(f"{name}[{index}]", text, max_chars)


def require_choice(name: str, value: str | None, choices: tuple[str, ...]) -> None:
    """Reject a value that is not one of the choices; None passes."""
    if value is not None and value not in choices:
        raise InvalidValueError(name, value, f"one of {', '.join(choices)}")


def require_range(name: str, value: float | None, low: float, high: float) -> None:
    """Reject a number that is not from `low` to `high`; None passes."""
    if value is not None and not low <= value <= high:  # NaN is in no range
        raise InvalidValueError(name, value, f"from {low} to {high}")


def require_count(name: str, count: int, low: int, high: int, unit: str) -> None:
    """Reject a number of entries that is not from `low` to `high`."""
    if not low <= count <= high:
        raise InvalidValueError(f"{name} length", count, f"from {low} to {high} {unit}")


def is_valid_unicode(text: str) -> bool:
    """Return whether a text has no lone surrogates, which cannot be encoded."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, as an object_pairs_hook. Raise ValueError if a key occurs twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name occurs twice, of which readers may take either")
    return values


class _Kinds(NamedTuple):
    """The alternatives of a field's annotation, and types whose values need no comparison.

    Nearly all values have one of these, and a look-up is faster than `_fits`.
    containers: those whose values need none if they are empty.
    """

    always: frozenset[type]
    containers: frozenset[type]
    kinds: tuple[Any, ...]

    @classmethod
    def of(cls, hint: Any) -> _Kinds:
        kinds = _alternatives(hint)
        named = {str if get_origin(each) is Literal else each for each in kinds}
        always = {each for each in named if get_origin(each) is None}
        always |= {int} if float in always else set()
        found = {each for kind in kinds if (each := _CONTAINERS.get(get_origin(kind)))}
        return cls(frozenset(always), frozenset(found), kinds)


_CONTAINERS: Mapping[Any, type] = {tuple: tuple, Mapping: dict}


@lru_cache
def _kinds(record_type: type[DataclassInstance]) -> dict[str, _Kinds]:
    hints = get_type_hints(record_type)
    return {each.name: _Kinds.of(hints[each.name]) for each in fields(record_type)}


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _fits(value: object, kind: Any) -> bool:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return isinstance(value, str)
    if origin is tuple:
        return isinstance(value, tuple) and _are_all(value, args[0])
    if origin is Mapping:
        return isinstance(value, Mapping) and _are_items(value, *args)
    return _is_type(type(value), kind)


def _are_items(items: Mapping[Any, Any], key: type, value: type) -> bool:
    return _are_all(items.keys(), key) and _are_all(items.values(), value)


def _are_all(values: Iterable[object], kind: type) -> bool:
    """Check by type, not one by one: there may be as many as a vocabulary has tokens."""
    return all(_is_type(each, kind) for each in set(map(type, values)))


def _is_type(given: type, kind: type) -> bool:
    if given is bool:
        return kind is bool
    return issubclass(given, (int, float) if kind is float else kind)


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "str"
    if kind is NoneType:
        return "None"
    return kind.__name__ if get_origin(kind) is None else str(kind)
