"""Translation of StructuredOutput to grammars of llguidance."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from specdec.text.grammar.json_schema import enforceable
from specdec.types.errors import InvalidValueError
from specdec.types.sampling.sampling_params import StructuredOutput

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_JSON: JsonCompileOptions = {
    # A model that may write whitespace anywhere sometimes generates nothing else.
    "whitespace_flexible": False,
    "item_separator": ",",
    "key_separator": ":",
    # A schema can set options; it must not disable the enforcement of a keyword.
    "lenient": False,
    "coerce_one_of": False,
}
_CHOICE = "start: CHOICE\nCHOICE: "
"""One lexeme: as alternatives of a rule, more than 2,000 texts exceed a limit of the parser."""

_ANY_OBJECT = '{"type":"object"}'
_NOUNS = {"json_schema": "a JSON schema", "regex": "a regular expression"}

MAX_GBNF_WORK = 16_000_000
"""Limit of rules times characters: the conversion of GBNF is quadratic in the rules, in Python."""

# An unclosed string ends with its line, so that every character is scanned once.
_LARK_TEXTS = re.compile(r'"(?:[^"\\\n]|\\.)*"?|//[^\n]*|/(?:[^/\\\n]|\\.)+/?|#[^\n]*')
_LARK_LIMITS = re.compile(r"\b(?:max_tokens|stop)\s*=")
_LARK_OPTIONS = r'\[(?:"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|[^\]"/\n])*\]'
_LARK_START = rf"[?!]*start(?:[ \t]*(?:\.-?\d+|\{{[^}}\n]*\}}|{_LARK_OPTIONS}))*[ \t]*:(?!:=)"
_LARK_BEGINS = re.compile(rf"^[ \t]*(?:%llguidance\b|{_LARK_START})", re.MULTILINE)

_PANIC = re.compile(r"panic:.*", re.DOTALL)  # llguidance enforces its own limits by assertions
_INNER_STATE = re.compile(r"<state>.*|<non-verbose/>", re.DOTALL)
_EXCERPT = re.compile(r"\n *\d+ \| .*", re.DOTALL)
_NOTHING_FITS = re.compile(r"NoExtension(Bias)?(\s*<non-verbose/>)?")
_GBNF_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)")


def to_llguidance(spec: StructuredOutput) -> str:
    """Translate to llguidance's format; raises InvalidValueError for a grammar it cannot parse.

    The result may still be invalid: llguidance checks it when it compiles it.
    """
    if spec.json_schema is not None:
        return _json_grammar(spec.json_schema)
    if spec.regex is not None:
        return LLMatcher.grammar_from_regex(spec.regex)
    if spec.grammar is not None:
        return LLMatcher.grammar_from_lark(_lark(spec.grammar))
    if spec.choice:
        texts = (_lark_string(text) for text in spec.choice)
        return LLMatcher.grammar_from_lark(_CHOICE + " | ".join(texts))
    return _json_grammar(_ANY_OBJECT)


def _lark_string(text: str) -> str:
    """Return a text as a string of Lark, which is one of JSON without a delete character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def _json_grammar(schema: str) -> str:
    try:
        content = json.loads(_as_object(schema))
        return LLMatcher.grammar_from_json_schema(enforceable(content), overrides=_JSON)
    except (ValueError, RecursionError) as error:  # not JSON, or nested too deeply
        raise refusal("json_schema", schema, str(error)) from error


def _as_object(schema: str) -> str:
    """Replace the schemas `true` and `false` by objects, because options need an object."""
    return {"true": "{}", "false": '{"not":{}}'}.get(schema.strip(), schema)


def _lark(grammar: str) -> str:
    lark = grammar if _LARK_BEGINS.search(grammar) else _from_gbnf(grammar)
    if "<" in _LARK_TEXTS.sub("", lark):
        raise refusal("grammar", grammar, "it names tokens (<...>); it may only describe text")
    return lark


def limits_lexemes(grammar: str) -> bool:
    """Return whether a grammar has lexemes with `max_tokens` or `stop`, which GBNF cannot have."""
    is_lark = _LARK_BEGINS.search(grammar) is not None
    return is_lark and _LARK_LIMITS.search(_LARK_TEXTS.sub('""', grammar)) is not None


def _from_gbnf(grammar: str) -> str:
    work = grammar.count("::=") * len(grammar)
    if work > MAX_GBNF_WORK:
        limit = f"rules times characters are {work}, above {MAX_GBNF_WORK}; Lark has no such limit"
        raise refusal("grammar", grammar, limit)
    try:
        return gbnf_to_lark(_GBNF_ESCAPE.sub(_plain, grammar))
    except Exception as error:  # it raises its own error, bare Exceptions, and on depth recursion
        raise refusal("grammar", grammar, str(error)) from error


def _plain(escape: re.Match[str]) -> str:
    """Rewrite a character escape of GBNF for Lark."""
    digits = escape[1] or escape[2]
    if digits is None:
        return escape[0]
    code = int(digits, 16)
    if 0xD800 <= code < 0xE000:
        raise ValueError(f"{escape[0]} is a lone surrogate")
    return f"\\x{code:02x}" if code < 128 else chr(code)


def refusal(kind: str, value: object, reason: str) -> InvalidValueError:
    """Return the error for an invalid grammar of this kind, with llguidance's reason."""
    limit = f"{_requirement(kind)}{plain_reason(reason)}"
    return InvalidValueError(f"structured_output.{kind}", value, limit)


def reason_of(error: InvalidValueError) -> str:
    """Return the reason that `refusal` was given."""
    kind = error.field.removeprefix("structured_output.")
    return error.limit.removeprefix(_requirement(kind))


def _requirement(kind: str) -> str:
    return f"{_NOUNS.get(kind, 'a grammar')} that can be enforced: "


def plain_reason(reason: str, max_chars: int = 300) -> str:
    """Return an error message of llguidance on one line, without its state and the grammar."""
    reason = _EXCERPT.sub("", reason)
    reason = _PANIC.sub("it is too large", reason)
    reason = _NOTHING_FITS.sub("no text satisfies it", reason)
    return " ".join(_INNER_STATE.sub("", reason).split())[:max_chars]
