"""Regular expressions of JSON schemas, which are those of ECMA-262, in the syntax of Rust's crate.

Rewrite only characters that the two write in different ways.
"""

from __future__ import annotations

import re

_PAIR = r"\\u(?P<high>[dD][89abAB][\da-fA-F]{2})\\u(?P<low>[dD][c-fC-F][\da-fA-F]{2})"
_ESCAPE = rf"{_PAIR}|\\0(?!\d)|\\."
_PART = re.compile(rf"{_ESCAPE}|\[\^?\]?(?:[^\]\\]|\\.)*+\]", re.DOTALL)
"""An escape, also of a pair of surrogates, or a class of characters."""

_PART_OF_CLASS = re.compile(rf"{_ESCAPE}|\[(?!:)|&(?=&)|~(?=~)", re.DOTALL)
"""An escape, or a character that is literal in ECMA-262: a bracket, or an operator of Rust's."""

_LOCAL = r"[A-Za-z0-9_'+\-]"
_TIME = r"T(?:\d+H(?:\d+M)?(?:\d+(?:[.,]\d+)?S)?|\d+M(?:\d+(?:[.,]\d+)?S)?|\d+(?:[.,]\d+)?S)"

_WITHOUT_LOOK_AROUND = {
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+"
    r"[A-Za-z]{2,}$": rf"^(?:{_LOCAL}+\.)*{_LOCAL}*[A-Za-z0-9_+-]@"
    r"(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
    r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": r"^P(?:\d+W|"
    rf"(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)(?:{_TIME})?|{_TIME})$",
}
"""Equivalents of the patterns that zod writes for an email address and for a duration."""


def as_rust(pattern: str) -> str:
    """Return a regular expression for Rust's crate; one that is not understood stays as it is."""
    return _PART.sub(_rewritten, _WITHOUT_LOOK_AROUND.get(pattern, pattern))


def _rewritten(part: re.Match[str]) -> str:
    text = part[0]
    if text.startswith("["):
        return f"[{_PART_OF_CLASS.sub(_in_class, text[1:-1])}]"
    return _escaped(part)


def _in_class(part: re.Match[str]) -> str:
    if part[0] == r"\b":
        return r"\x08"
    return _escaped(part) if part[0].startswith("\\") else f"\\{part[0]}"


def _escaped(part: re.Match[str]) -> str:
    if part["high"]:
        pair = bytes.fromhex(part["high"] + part["low"])
        return re.escape(pair.decode("utf-16-be"))
    return r"\x00" if part[0] == r"\0" else part[0]
