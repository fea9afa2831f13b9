"""Configuration fields: their limits, descriptions and default texts."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from specdec.types.errors import UnknownFieldError, UnknownNameError

_SYNONYMS: Mapping[str, str] = MappingProxyType({"num_draft_tokens": "num_speculative_tokens"})
"""The meaning of unknown names that are nearer to another name by their letters."""

LONGEST_WAIT_S = 2_000_000
"""More time cannot be waited for: poll and sockets take 2^31 ms, which are two days more."""

_NULL = "\0"
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?")


@dataclass(frozen=True)
class Limit:
    """The valid values of a setting.

    text: completes the sentence "it must be ...". accepts: whether a value of any type is valid.
    kind: type of the command line flag. options: the values of an enumeration.
    brief: short text for help; empty if the type suffices.
    """

    text: str
    accepts: Callable[[object], bool]
    kind: type[int | float | str | bool] = str
    options: tuple[str, ...] = ()
    brief: str = ""


def whole_number(low: int, high: int) -> Limit:
    """Return the limit of an int from low to high."""

    def accepts(value: object) -> bool:
        return type(value) is int and low <= value <= high  # excludes bool, unlike isinstance

    text = f"a whole number from {low} to {high}"
    return Limit(text, accepts, kind=int, brief=f"{low} to {high}")


def one_of(*options: str) -> Limit:
    """Return the limit of an enumeration."""
    return Limit(f"one of {', '.join(options)}", lambda value: value in options, options=options)


def optional(limit: Limit) -> Limit:
    """Return the limit that also accepts None."""
    return replace(limit, accepts=lambda value: value is None or limit.accepts(value))


def at_most(limit: Limit, high: int) -> Limit:
    """Return the limit of those numbers of a limit that are at most `high`."""

    def accepts(value: object) -> bool:
        return limit.accepts(value) and isinstance(value, int | float) and value <= high

    text, brief = f"{limit.text} and at most {high}", f"{limit.brief}, at most {high}"
    return replace(limit, text=text, accepts=accepts, brief=brief)


def node_labels(text: str | None) -> dict[str, str]:
    """Parse labels such as "key=value,key=value"; {} for None. Raises ValueError."""
    pairs = [] if text is None else [each.strip().partition("=") for each in text.split(",")]
    if not all(_LABEL.fullmatch(key) and _LABEL.fullmatch(value) for key, _, value in pairs):
        raise ValueError(text)
    return {key: value for key, _, value in pairs}


def _is_labels(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(node_labels(value))
    except ValueError:
        return False


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and value is not True and 0 < value < math.inf


def _is_file(value: object) -> bool:
    return isinstance(value, Path) and value.is_file()


def _is_no_file(value: object) -> bool:
    if not isinstance(value, Path) or _NULL in str(value):
        return False
    return value.is_dir() or not value.exists()


def _is_endpoint(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        parts = urlsplit(value)
        has_port = parts.port is not None
    except ValueError:  # an invalid IPv6 address or port
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and has_port


POSITIVE = Limit("a number above 0", _is_positive, kind=float, brief="above 0")
NOT_NEGATIVE = Limit(
    "a number of at least 0",
    lambda value: _is_positive(value) or (value == 0 and value is not False),
    kind=float,
    brief="0 or more",
)
SHARE = at_most(POSITIVE, 1)
TEXT = Limit(
    "a non-empty string without null characters",
    lambda value: isinstance(value, str) and value != "" and _NULL not in value,
)
BOOLEAN = Limit("true or false", lambda value: isinstance(value, bool), kind=bool)
ENDPOINT = optional(Limit("a URL such as http://localhost:4317", _is_endpoint))
LABELS = optional(Limit("labels such as key=value or key=value,other=value", _is_labels))
FILE = optional(Limit("the path of an existing file", _is_file))
DIRECTORY = optional(Limit("the path of a directory", _is_no_file))


@dataclass(frozen=True)
class Setting:
    """Metadata of a configuration field: its limit, its description and its default as text."""

    limit: Limit
    meaning: str
    default: str

    @property
    def help(self) -> str:
        """Description, range of a number, and default, as one paragraph."""
        limit = f" ({self.limit.brief})" if self.limit.brief else ""
        default = {"True": "yes", "False": "no"}.get(self.default, self.default)
        return f"{self.meaning}{limit}. Default: {default}."


def setting(default: Any, limit: Limit, meaning: str, default_text: str = "") -> Any:
    """Return a configuration field; `default_text` describes a default such as None."""
    metadata = Setting(limit, meaning, default_text or str(default))
    return field(default=default, metadata={"setting": metadata})


def refuse_unknown(what: str, names: Iterable[object], known: Iterable[str]) -> None:
    """Raise UnknownNameError for the first unknown name, with the nearest known one."""
    known = list(known)
    for name in names:
        if name not in known:
            raise UnknownNameError(what, name, _hint(str(name), known))


def refuse_unknown_fields(
    sent: Mapping[str, object], known: Iterable[str], parent: str = ""
) -> None:
    """Raise UnknownFieldError for the first unknown field of an object in a request.

    parent: field that the object is the value of; empty for the request itself.
    """
    known = list(known)
    for name, value in sent.items():
        if name not in known:
            field_path = f"{parent}.{name}" if parent else name
            raise UnknownFieldError(field_path, value, _hint(name, known))


def _hint(name: str, known: Sequence[str]) -> str:
    """Return a question with the nearest known name; all known names without a near one."""
    synonyms = {each: meant for each, meant in _SYNONYMS.items() if meant in known}
    nearest = difflib.get_close_matches(name, [*synonyms, *known], n=1)
    if not nearest:
        return f"known: {', '.join(known)}"
    return f"did you mean {synonyms.get(nearest[0], nearest[0])}?"
