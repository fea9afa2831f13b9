"""Types of the parameters of commands. Nothing here imports the client or the service."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import click

from specdec.config.fields import LONGEST_WAIT_S

EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
NEW_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)

_Item = TypeVar("_Item")


class _Timeout(click.ParamType[float | None]):
    """Seconds above 0; None for inf, and for more than can be waited for."""

    name = "seconds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float | None:
        """Return the seconds of a text, or None for no limit."""
        with suppress(ValueError):
            if (seconds := float(value)) > 0:
                return seconds if seconds <= LONGEST_WAIT_S else None
        self.fail(f"{value!r} is not a number above 0, nor inf", param, ctx)


TIMEOUT = _Timeout()


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
