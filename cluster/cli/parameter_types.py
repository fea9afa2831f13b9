"""Types of the parameters of commands. Nothing here imports the client or the service."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
NEW_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)

_Item = TypeVar("_Item")


class ListOf(click.ParamType[tuple[_Item, ...]]):
    """Comma-separated values."""

    def __init__(self, name: str, read: Callable[[str], _Item]) -> None:
        self.name = name
        self._read = read

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[_Item, ...]:
        """Return the values of a text; the default may be given as a tuple."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(self._read(part.strip()) for part in str(value).split(","))
        except ValueError as error:
            self.fail(f"{value!r}: {error}", param, ctx)
