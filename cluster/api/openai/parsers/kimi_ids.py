"""Functions that the ids of Kimi's calls name, also in other forms than its own."""

from __future__ import annotations

import re
from collections.abc import Collection

_PREFIX = "functions."


def read_kimi_id(written: str, names: Collection[str]) -> tuple[str, str] | None:
    """Return the function that an id names, and the id; empty for one in another form.

    Kimi writes `functions.NAME:0`, and the template repeats the id. It also copies forms from the
    chat, where clients leave out or replace parts of ids. None if the id is of none of the
    functions, or if it may be of several.
    """
    base, _, index = written.rpartition(":")
    if index.isdecimal():
        for name in (base.removeprefix(_PREFIX), base):
            if name in names:
                return name, written
    for name in (written, written.removeprefix(_PREFIX)):
        if name in names:
            return name, ""
    found = [each for each in names if _other_form(each).fullmatch(written)]
    return (found[0], "") if len(found) == 1 else None


def _other_form(name: str) -> re.Pattern[str]:
    """Return the pattern of ids such as `functions_NAME_0` and `functionsNAME0`."""
    return re.compile(rf"functions[._]?{re.escape(name)}(?:[:_]?[0-9]{{1,6}})?")
