"""Generates values.yaml: every value with its default, below its description as a comment."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import yaml
from pydantic.fields import FieldInfo

from tools.chart.kinds import Values
from tools.chart.values import ChartValues
from tools.generated_files import GENERATED_BY_CHART

_WIDTH = 100


def values_yaml() -> str:
    """Generate the whole file."""
    return GENERATED_BY_CHART + "\n" + "\n".join(_lines(ChartValues(), 0)) + "\n"


def _lines(values: Values, depth: int) -> Iterator[str]:
    for name, field in type(values).model_fields.items():
        if depth == 0 and name != "name_override":
            yield ""
        yield from _comment(field, depth)
        yield from _entry(field.alias or name, getattr(values, name), depth)


def _comment(field: FieldInfo, depth: int) -> Iterator[str]:
    indent = "  " * depth + "# "
    for line in textwrap.wrap(field.description or "", _WIDTH - len(indent)):
        yield indent + line


def _entry(name: str, value: Any, depth: int) -> Iterator[str]:
    indent = "  " * depth
    match value:
        case Values():
            yield f"{indent}{name}:"
            yield from _lines(value, depth + 1)
        case dict() if any(isinstance(item, Values) for item in value.values()):
            yield f"{indent}{name}:"
            for key, item in value.items():
                yield from _entry(key, item, depth + 1)
        case list() if any(isinstance(item, Values) for item in value):
            yield f"{indent}{name}:"
            for item in value:
                yield from _item(item, depth + 1)
        case _:
            yield from _plain(name, value, depth)


def _item(value: Values, depth: int) -> Iterator[str]:
    """Yield the lines of a list item; the dash precedes its first key, after that key's comment."""
    lines, indent = list(_lines(value, depth + 1)), "  " * depth
    first = next(index for index, line in enumerate(lines) if not line.lstrip().startswith("#"))
    lines[first] = f"{indent}- {lines[first].lstrip()}"
    yield from lines


def _plain(name: str, value: Any, depth: int) -> Iterator[str]:
    text = yaml.safe_dump({name: value}, sort_keys=False, width=_WIDTH, allow_unicode=True)
    yield from textwrap.indent(text.rstrip(), "  " * depth).splitlines()
