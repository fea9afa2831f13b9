"""Generates random messages from their descriptors, so that new fields are covered too."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

MILD_INTEGERS = (0, 1, 2, 3, 4, 5, 7, 8, 16, 20, 31, 32, 100, 127, 128, 255, 256, 381, 382)
WILD_INTEGERS = (-1, -2, 21, 33, 129, 383, 511, 512, 513, 1000, 1001, 4096, 4097, 65_536)
FARTHEST_INTEGERS = (2**31 - 1, -(2**31), 2**63 - 1, -(2**63), 2**53 + 1)

MILD_FLOATS = (0.0, 0.1, 0.5, 0.9, 1.0, 1.5, 2.0)
WILD_FLOATS = (-0.0, -1.0, 1 + 1e-12, 100.0, 100.001, 1e-300, 5e-324, 1e38, 1e308, 2.0**63)
NO_NUMBERS = (float("nan"), float("inf"), float("-inf"))

TEXTS = (
    *("", " ", "x", "Ask the baker", "Ask the baker " * 30, "the river the river the river"),
    *("user", "system", "assistant", "coupled", "ngram", "tiny", "0", "-1", "true", "None"),
    *("<|im_start|>", "<|im_end|>", "{{ 7 * 7 }}", "{% for x in range(9999999) %}", "%s%n", "{0}"),
    *("\0", "a\0b", "\n", "\r\nX-Header: 1", "\x1b[2J", "\x7f", "\ufeff", "\ufffe", "\ufffd"),
    *("é", "e\u0301", "日本語", "שלום", "\u202eright to left", "👩‍👩‍👧‍👦", "🏴" * 40, "\U0010ffff"),
    *("a" * 129, "a" * 257, "ab " * 5_000, "\U0001f600" * 4_097),
    *("[a-z]+", "(", "(a+)+$", "a{1,99999}", "[^\\s\\S]", "(?=x)", "\\1", "((((((((((a))))))))))"),
    *(
        "{}",
        "[]",
        "null",
        '{"type": "object"}',
        '{"type": "string", "maxLength": 3}',
        '{"$ref": "#"}',
    ),
    *(
        '{"enum": []}',
        '{"type": "integer", "minimum": 1e400}',
        '{"a":' * 500,
        "[" * 5_000,
        '{"a": 1',
    ),
    *('start: "a" | "b"', 'root ::= "a" | "b"', "start: start", 'root ::= root "a"', "start: /(/"),
    *("../../../../etc/passwd", "'; DROP TABLE changes; --", "file:///etc/passwd", "\\x00\\uD800"),
)

_LENGTHS = (0, 1, 1, 2, 2, 3, 17, 257)
_FAR_LENGTH = 20_000
_SHORT_FIELDS = 400
"""Elements with more bytes are not repeated hundreds of times: other tests cover size limits."""
_MAX_DEPTH = 8


class MessageMaker:
    """Generator of random messages; equal seeds generate equal messages."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._wildness = random.choice((0.0, 0.1, 0.5, 1.0))
        self._fill = random.choice((0.05, 0.2, 0.6, 0.95))

    def message(self, descriptor: Descriptor, depth: int = 0) -> Message:
        """Generate a message of this type, with a random subset of its fields."""
        message = GetMessageClass(descriptor)()
        for field in descriptor.fields:
            if depth < _MAX_DEPTH and self._random.random() < self._fill:
                self._set(message, field, depth)
        return message

    def _set(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        if field.message_type and field.message_type.GetOptions().map_entry:
            self._set_map(getattr(message, field.name), field.message_type)
        elif field.is_repeated:
            self._extend(getattr(message, field.name), field, depth)
        elif field.message_type:
            made = self.message(field.message_type, depth + 1)
            getattr(message, field.name).CopyFrom(made)
        else:
            setattr(message, field.name, self._scalar(field))

    def _set_map(self, entries: Any, entry: Descriptor) -> None:
        key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
        for _ in range(self._length()):
            entries[self._scalar(key)] = self._scalar(value)

    def _extend(self, elements: Any, field: FieldDescriptor, depth: int) -> None:
        if field.message_type:
            count = min(self._length(), 17)
            elements.extend(self.message(field.message_type, depth + 1) for _ in range(count))
            return
        made = [self._scalar(field) for _ in range(min(self._length(), 17))]
        small = [each for each in made if len(str(each)) < _SHORT_FIELDS]
        elements.extend(made + small * (self._length() // 17))

    def _length(self) -> int:
        is_far = self._random.random() < 0.01 * self._wildness
        return _FAR_LENGTH if is_far else self._random.choice(_LENGTHS)

    def _scalar(self, field: FieldDescriptor) -> Any:
        return _MAKERS[field.cpp_type](self._random, self._random.random() < self._wildness, field)


def _integer(low: int, high: int) -> Callable[[Random, bool, FieldDescriptor], int]:
    mild = [each for each in MILD_INTEGERS if low <= each <= high]
    farthest = [each for each in (*FARTHEST_INTEGERS, low, high) if low <= each <= high]
    wild = [each for each in WILD_INTEGERS if low <= each <= high] + farthest
    return lambda random, is_wild, _: random.choice(wild if is_wild else mild)


def _float(random: Random, is_wild: bool, _: FieldDescriptor) -> float:
    return random.choice(WILD_FLOATS + NO_NUMBERS if is_wild else MILD_FLOATS)


def _text(random: Random, is_wild: bool, field: FieldDescriptor) -> str:
    assert field.type == FieldDescriptor.TYPE_STRING, f"{field.full_name}: bytes are not made yet"
    text = random.choice(TEXTS if is_wild else TEXTS[:16])
    return text + random.choice(TEXTS) if is_wild and random.random() < 0.2 else text


def _enum(random: Random, is_wild: bool, field: FieldDescriptor) -> int:
    known = [value.number for value in field.enum_type.values]
    return random.choice([-1, max(known) + 1, 2**31 - 1] if is_wild else known)


_MAKERS: dict[int, Callable[[Random, bool, FieldDescriptor], Any]] = {
    FieldDescriptor.CPPTYPE_INT32: _integer(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: _integer(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: _integer(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: _integer(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_FLOAT: _float,
    FieldDescriptor.CPPTYPE_DOUBLE: _float,
    FieldDescriptor.CPPTYPE_BOOL: lambda random, _, __: random.random() < 0.5,
    FieldDescriptor.CPPTYPE_STRING: _text,
    FieldDescriptor.CPPTYPE_ENUM: _enum,
}
