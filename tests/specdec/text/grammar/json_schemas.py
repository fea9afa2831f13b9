"""JSON schemas, each with a prompt that asks for a matching document."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker

Schema = dict[str, Any]


class _Formats(FormatChecker):  # type: ignore[misc] # jsonschema has no types
    """Formats of JSON Schema, with the leap seconds of RFC 3339 (section 5.6).

    llguidance's grammar of a time has them, and jsonschema's validator does not.
    """

    def check(self, instance: object, format: str) -> None:
        """Raise FormatError if `instance` does not have the format."""
        if format in ("time", "date-time") and isinstance(instance, str):
            instance = re.sub(r"(:\d\d):60", r"\1:59", instance)
        Draft202012Validator.FORMAT_CHECKER.check(instance, format)


@dataclass(frozen=True)
class SchemaCase:
    """Named schema with its prompt."""

    name: str
    prompt: str
    schema: Schema

    @property
    def text(self) -> str:
        """Schema as JSON."""
        return json.dumps(self.schema, ensure_ascii=False)

    def validate(self, output: str) -> None:
        """Raise the exception of json or jsonschema if `output` is invalid.

        Numbers are parsed as decimals: as a float, 8775.3 is not a multiple of 0.01.
        """
        schema = json.loads(self.text, parse_float=Decimal)
        validator = Draft202012Validator(schema, format_checker=_Formats())
        validator.validate(json.loads(output, parse_float=Decimal))


def _object(**properties: Any) -> Schema:
    """Return an object schema in which all properties are required and no others are allowed."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _text(max_length: int = 40, **more: Any) -> Schema:
    return {"type": "string", "maxLength": max_length, **more}


def _array(items: Schema, least: int, most: int) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _integer(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


_STRING, _INT, _BOOL = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
_TREE = {
    "$defs": {
        "tree": _object(value=_integer(0, 9), children=_array({"$ref": "#/$defs/tree"}, 0, 2))
    },
    "$ref": "#/$defs/tree",
}
_LINKED = {
    "$defs": {
        "node": _object(
            value=_integer(0, 99), next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}
        )
    },
    "$ref": "#/$defs/node",
}
_SUM = {
    "$defs": {
        "term": {
            "anyOf": [
                _integer(0, 99),
                _object(
                    op={"enum": ["+", "-"]}, left=_integer(0, 99), right={"$ref": "#/$defs/term"}
                ),
            ]
        }
    },
    "$ref": "#/$defs/term",
}
_FOLDER = {
    "$defs": {
        "entry": {
            "anyOf": [
                _object(file=_text(20)),
                _object(folder=_text(20), entries=_array({"$ref": "#/$defs/entry"}, 0, 2)),
            ]
        }
    },
    "$ref": "#/$defs/entry",
}
_COMMENT = {
    "$defs": {
        "comment": {
            "type": "object",
            "properties": {
                "author": _text(15),
                "text": _text(40),
                "reply": {"$ref": "#/$defs/comment"},
            },
            "required": ["author", "text"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/comment",
}
_NESTED_LISTS = {
    "$defs": {"value": {"anyOf": [_integer(0, 9), _array({"$ref": "#/$defs/value"}, 0, 2)]}},
    "$ref": "#/$defs/value",
}
_PERSON = _object(name=_text(), age=_integer(0, 120))
_ADDRESS = _object(street=_text(), city=_text(20), zip={"type": "string", "pattern": "^[0-9]{5}$"})
_MONEY = {"type": "number", "minimum": 0, "maximum": 9999, "multipleOf": 0.01}


def _format(name: str) -> Schema:
    return {"type": "string", "format": name, "maxLength": 60}


_CASES: list[tuple[str, str, Schema]] = [
    ("person", "Alice is 34 years old. Give her name and age", _PERSON),
    ("name", "What is the name of Bob Miller? Give the name", _object(name=_STRING)),
    ("capital", "Capital of France, and its country", _object(city=_STRING, country=_STRING)),
    ("flag", "Is water wet? Give the answer", _object(answer=_BOOL)),
    ("count", "How many legs have three dogs? Give the number", _object(legs=_integer(0, 100))),
    ("free_integer", "How many days has a week? Give the number", _object(days=_INT)),
    ("nothing", "Give an object that holds null", _object(nothing={"type": "null"})),
    ("nullable", "A user without an email", _object(email={"type": ["string", "null"]})),
    ("book", "A famous book", _object(title=_text(), author=_text(), year=_integer(1000, 2030))),
    ("weather", "Weather in Oslo", _object(city=_text(20), celsius=_integer(-60, 60), wet=_BOOL)),
    ("empty", "An empty object", _object()),
    ("top_string", "A greeting, as a JSON string", _text(30)),
    ("top_integer", "Six times seven, as a number", _integer(0, 1000)),
    ("top_boolean", "Is the sky blue? true or false", _BOOL),
    ("top_null", "null", {"type": "null"}),
    ("top_array", "The first three primes", _array(_integer(0, 9), 3, 3)),
    ("constant", "The version", _object(version={"const": 2}, kind={"const": "release"})),
    ("nested", "Bob, 41, lives at 5 Main Street", _object(person=_PERSON, address=_ADDRESS)),
    (
        "deep",
        "A deeply nested object",
        _object(a=_object(b=_object(c=_object(d=_object(e=_integer(0, 9)))))),
    ),
    ("people", "Two people with their ages", _object(people=_array(_PERSON, 1, 3))),
    ("matrix", "A 2 by 2 matrix", _array(_array(_integer(-9, 9), 2, 2), 2, 2)),
    (
        "invoice",
        "An invoice for two pens",
        _object(items=_array(_object(name=_text(15), price=_MONEY), 1, 2), total=_MONEY),
    ),
    (
        "company",
        "A company with one office",
        _object(name=_text(20), offices=_array(_object(city=_text(20), staff=_PERSON), 1, 1)),
    ),
    ("color", "The color of grass", _object(color={"enum": ["red", "green", "blue"]})),
    ("enum_top", "Pick a day of the weekend", {"enum": ["Saturday", "Sunday"]}),
    ("enum_mixed", "Pick one", {"enum": [1, "one", True, None, 2.5, ["x"], {"a": 1}]}),
    ("enum_prefixes", "Pick a word", {"enum": ["a", "ab", "abc", "abcd"]}),
    ("enum_long", "Pick a number", {"enum": [f"item number {i}" for i in range(200)]}),
    ("enum_escapes", "Pick one", {"enum": ['say "hi"', "back\\slash", "new\nline", "tab\t"]}),
    (
        "sentiment",
        "The film was wonderful. What is the sentiment?",
        _object(sentiment={"enum": ["positive", "negative"]}, score=_integer(1, 5)),
    ),
    (
        "call",
        "Call the tool for the weather in Rome",
        _object(name={"enum": ["weather", "time"]}, arguments=_object(city=_text(20))),
    ),
    (
        "phone",
        "A phone number",
        _object(phone={"type": "string", "pattern": "^[0-9]{3}-[0-9]{4}$"}),
    ),
    ("plate", "A number plate", _object(p={"type": "string", "pattern": "^[A-Z]{2}[0-9]{2,4}$"})),
    ("hex", "The color red in hex", {"type": "string", "pattern": "^#[0-9a-f]{6}$"}),
    (
        "slug",
        "A slug for a page on rivers",
        {"type": "string", "pattern": "^[a-z]+(-[a-z]+){0,3}$"},
    ),
    ("version", "A version", {"type": "string", "pattern": "^v[0-9]{1,2}(\\.[0-9]{1,2}){2}$"}),
    ("either", "yes or no", {"type": "string", "pattern": "^(yes|no|maybe so)$"}),
    ("ticket", "A ticket id", _object(id={"type": "string", "pattern": "^(BUG|FIX)-\\d{1,5}$"})),
    ("contains", "A text with a digit", {"type": "string", "pattern": "[0-9]", "maxLength": 20}),
    ("date", "The first day of 2024", _object(date=_format("date"))),
    ("time", "Noon", _object(time=_format("time"))),
    ("date_time", "The first second of 2024", _object(at=_format("date-time"))),
    ("email", "Alice's email address", _object(email=_format("email"))),
    ("uuid", "A UUID", _object(id=_format("uuid"))),
    ("ipv4", "The address of this host", _object(ip=_format("ipv4"))),
    ("percent", "How likely is rain?", _object(percent=_integer(0, 100))),
    ("narrow", "A number from 17 to 23", _integer(17, 23)),
    ("negative", "A temperature below zero", {"type": "integer", "minimum": -40, "maximum": -1}),
    (
        "exclusive",
        "A number between 0 and 10",
        {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
    ),
    ("multiple", "A multiple of 25", {"type": "integer", "multipleOf": 25, "maximum": 500}),
    ("price", "The price of a coffee", _object(price=_MONEY)),
    (
        "ratio",
        "One half",
        {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.001},
    ),
    ("umlaut", "Größe und Straße in München", _object(größe=_integer(1, 300), straße=_text(20))),
    ("chinese", "北京的天气", _object(城市={"enum": ["北京", "上海"]}, 温度=_integer(-30, 45))),
    ("emoji", "How do you feel?", _object(mood={"enum": ["😀", "😢", "👩‍💻", "🇳🇴"]})),
    ("cyrillic", "Столица России", _object(столица=_text(15))),
    ("key_escapes", "Odd keys", _object(**{'a "b"': _INT | {"maximum": 9}, "c\\d": _BOOL})),
    ("greek", "A Greek letter", {"type": "string", "pattern": "^[β-ω]{1,3}$"}),
    ("linked", 'A list of 1 and 2, as {"value":1,"next":{"value":2,"next":null}}', _LINKED),
    ("tree", 'A leaf with value 5, as {"value":5,"children":[]}', _TREE),
    ("sum", "The expression 1 + 2", _SUM),
    ("folder", "A folder docs with the file a.txt", _FOLDER),
    ("comments", "A comment by Ann without a reply", _COMMENT),
    ("nested_lists", "The list [1,2]", _NESTED_LISTS),
    ("string_or_number", "The answer is 42", {"anyOf": [_text(10), _integer(0, 99)]}),
    ("one_of", "Is it on?", _object(state={"oneOf": [_BOOL, {"type": "null"}]})),
    (
        "shapes",
        "A circle of radius 3",
        {
            "anyOf": [
                _object(kind={"const": "circle"}, radius=_integer(1, 99)),
                _object(kind={"const": "square"}, side=_integer(1, 99)),
            ]
        },
    ),
    (
        "all_of",
        "A number from 5 to 8",
        {"allOf": [{"type": "integer"}, {"minimum": 5}, {"maximum": 8}]},
    ),
    (
        "shared",
        "A route from Rome to Paris",
        {
            "$defs": {"place": _object(name=_text(15), km=_integer(0, 5000))},
            **_object(start={"$ref": "#/$defs/place"}, end={"$ref": "#/$defs/place"}),
        },
    ),
    (
        "optional",
        "A user called Ann with the age 30",
        {
            "type": "object",
            "properties": {"name": _text(15), "age": _integer(0, 120), "admin": _BOOL},
            "additionalProperties": False,
        },
    ),
    (
        "scores",
        "The scores of two players",
        {
            "type": "object",
            "properties": {"ann": _integer(0, 9)},
            "required": ["ann", "bob"],
            "additionalProperties": _integer(0, 9),
            "maxProperties": 2,
        },
    ),
    (
        "tuple",
        "A point with a label",
        {
            "type": "array",
            "prefixItems": [_integer(-99, 99), _integer(-99, 99), _text(10)],
            "items": False,
            "minItems": 3,
        },
    ),
    ("tags", "Two tags for a recipe", _object(tags=_array(_text(12), 1, 4))),
    (
        "bounded_text",
        "A word of four to eight letters",
        {"type": "string", "minLength": 4, "maxLength": 8},
    ),
    (
        "settings",
        "Default settings",
        _object(
            theme={"enum": ["light", "dark"]}, size=_integer(8, 72), sync=_BOOL, tabs={"const": 4}
        ),
    ),
]

CASES = tuple(SchemaCase(*case) for case in _CASES)
