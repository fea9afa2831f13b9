"""Codec of one protobuf message type and the dataclass whose fields have the same names.

The two declarations are the only lists of fields: a field that both of them declare is converted in
both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from datetime import UTC, datetime
from numbers import Integral
from types import NoneType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, get_args, get_type_hints

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.timestamp_pb2 import Timestamp

from specdec.types.errors import InvalidValueError

if TYPE_CHECKING:
    from dataclasses import Field

    from _typeshed import DataclassInstance

MessageT = TypeVar("MessageT", bound=Message)
RecordT = TypeVar("RecordT", bound="DataclassInstance")

_INTEGER_BITS = {FieldDescriptor.CPPTYPE_INT32: 32, FieldDescriptor.CPPTYPE_INT64: 64}


class Converter(NamedTuple):
    """Conversion of a value to its form in a message and back."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


class Oneof(NamedTuple):
    """A oneof that holds one attribute; `choose` returns the field to set for a value."""

    name: str
    choose: Callable[[Any], str]


@dataclass(frozen=True)
class Options:
    """Exceptions from the conversion of fields by name.

    parts: codecs of nested dataclasses by attribute. Without a field of the attribute's name, the
    nested fields are fields of the same message. converters: by field, in place of those that
    follow from its type. renamed: attributes of fields whose name differs. oneofs: by attribute.
    sends_defaults: whether optional fields with the default value are set. zero_is_default: whether
    a zero in a message stands for the default value. make: in place of the dataclass, to decode.
    """

    parts: Mapping[str, MessageCodec[Any, Any]] = field(default_factory=dict)
    converters: Mapping[str, Converter] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    oneofs: Mapping[str, Oneof] = field(default_factory=dict)
    sends_defaults: bool = False
    zero_is_default: bool = False
    make: Callable[..., Any] | None = None


class _Field(NamedTuple):
    """A field of a message and its attribute. bits: of the integers in the field."""

    name: str
    attribute: str
    convert: Converter
    has_presence: bool
    bits: int | None


class MessageCodec(Generic[MessageT, RecordT]):
    """Codec between a message type and a dataclass.

    An absent field takes the attribute's default, or None where there is no default. None is not
    sent, nor is an optional field that has the attribute's default.
    """

    def __init__(
        self,
        message_type: type[MessageT],
        record_type: type[RecordT],
        options: Options | None = None,
    ) -> None:
        self.message_type = message_type
        self._options = options = options or Options()
        self._make = options.make or record_type
        self._hints = get_type_hints(record_type)
        self._defaults = {each.name: _default(each) for each in fields(record_type)}
        descriptor = message_type.DESCRIPTOR
        self._fields = [
            self._field(each, attribute)
            for each in descriptor.fields
            if (attribute := options.renamed.get(each.name, each.name)) in self._hints
        ]
        self._members = {
            attribute: {
                each.name: self._field(each, attribute)
                for each in descriptor.oneofs_by_name[oneof.name].fields
            }
            for attribute, oneof in options.oneofs.items()
        }
        named = {each.attribute for each in self._all_fields()}
        self._flat = {name: part for name, part in options.parts.items() if name not in named}
        self._by_name = {each.name: each for each in self._all_fields()}
        without_presence = [each for each in self._fields if not each.has_presence]
        implicit = [] if options.zero_is_default else without_presence
        self._converted = [each for each in implicit if each.convert not in _PLAIN]
        self._absent = self._values_of_absent(implicit)

    @property
    def unsent(self) -> frozenset[str]:
        """Names of the attributes that no field of the message holds."""
        sent = {each.attribute for each in self._all_fields()} | self._flat.keys()
        return frozenset(self._defaults.keys() - sent)

    @property
    def unmapped(self) -> set[str]:
        """Names of the fields of the message that are not converted."""
        names = {each.name for each in self.message_type.DESCRIPTOR.fields}
        unmapped = names - {each.name for each in self._all_fields()}
        return unmapped.intersection(*(part.unmapped for part in self._flat.values()))

    def encode(self, record: RecordT, **given: Any) -> MessageT:
        """Return the message for a record. given: fields that are not converted here.

        Raises InvalidValueError for an integer that is too large for its field, and for text that
        is not valid Unicode.
        """
        try:
            return self.message_type(**self._values(record), **given)
        except UnicodeEncodeError as error:
            raise InvalidValueError("text", error.object, "valid Unicode") from error
        except InvalidValueError:
            raise
        except ValueError:
            self._require_integers(record)
            raise

    def decode(self, message: Any, **given: Any) -> RecordT:
        """Return the record in a message. given: attributes that are not converted here.

        Raises what the dataclass raises for the values.
        """
        values = {**self._absent, **given}
        present = {descriptor.name: value for descriptor, value in message.ListFields()}
        for each in self._converted:
            if each.name not in present:
                values[each.attribute] = each.convert.decode(getattr(message, each.name))
        for name, value in present.items():
            known = self._by_name.get(name)
            if known is not None and (value or not self._options.zero_is_default):
                values[known.attribute] = known.convert.decode(value)
        for attribute, part in self._flat.items():
            values[attribute] = part.decode(message)
        return self._make(**values)

    def _values(self, record: RecordT) -> dict[str, Any]:
        """Return the fields to set."""
        values = {}
        for name, attribute, convert, has_presence, _ in self._fields:
            value = getattr(record, attribute)
            is_default = has_presence and value == self._defaults[attribute]
            if value is not None and (self._options.sends_defaults or not is_default):
                values[name] = convert.encode(value)
        for attribute, oneof in self._options.oneofs.items():
            if (value := getattr(record, attribute)) is not None:
                name = oneof.choose(value)
                values[name] = self._members[attribute][name].convert.encode(value)
        for attribute, part in self._flat.items():
            values |= part._values(getattr(record, attribute))
        return values

    def _values_of_absent(self, implicit: Sequence[_Field]) -> dict[str, Any]:
        """Return the attributes of fields that are absent, unless they have their defaults."""
        optional = {each.attribute for each in self._fields if each.has_presence}
        values: dict[str, Any] = {
            name: None
            for name in optional | self._options.oneofs.keys()
            if self._defaults[name] is MISSING
        }
        empty = self.message_type()
        for each in implicit:
            if each.convert in _PLAIN:
                values[each.attribute] = each.convert.decode(getattr(empty, each.name))
        return {name: value for name, value in values.items() if value != self._defaults[name]}

    def _all_fields(self) -> Iterator[_Field]:
        yield from self._fields
        for members in self._members.values():
            yield from members.values()

    def _field(self, descriptor: Any, attribute: str) -> _Field:
        nested, is_optional = descriptor.message_type, NoneType in get_args(self._hints[attribute])
        convert = self._options.converters.get(descriptor.name)
        if convert is None:
            convert = _converter(descriptor, self._options.parts.get(attribute))
        has_presence = descriptor.has_presence
        if nested is not None and not is_optional and not _is_list(nested):
            has_presence = False  # always sent, and read from an absent message too
        if is_optional and not has_presence and descriptor.type == FieldDescriptor.TYPE_STRING:
            convert = convert._replace(decode=lambda text: text or None)
        return _Field(descriptor.name, attribute, convert, has_presence, _bits(descriptor))

    def _require_integers(self, record: RecordT) -> None:
        """Raise InvalidValueError for the first integer that is too large for its field."""
        for name, attribute, _, _, bits in self._all_fields():
            for path, number in _integers(name, getattr(record, attribute)):
                if bits is not None and not -(1 << bits - 1) <= number < 1 << bits - 1:
                    raise InvalidValueError(path, number, f"a number of {bits} bits")


_UNCHANGED = Converter(lambda value: value, lambda value: value)
_LIST = Converter(_UNCHANGED.encode, tuple)
_MAP = Converter(_UNCHANGED.encode, dict)
_PLAIN = (_UNCHANGED, _LIST, _MAP)
"""Conversions of which an absent field always has the same result; it is never changed."""


def enum_converter(enum: EnumDescriptor) -> Converter:
    """Return the conversion of names, as `coupled` for `VERIFIER_COUPLED`; None is the value 0.

    A number without a name is decoded as its text, which the dataclass refuses by the known names.
    """
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    numbers = {each.name.removeprefix(prefix).lower(): each.number for each in enum.values}
    names: dict[int, str | None] = {number: name for name, number in numbers.items()}
    names[0] = None
    return Converter(numbers.__getitem__, lambda number: names.get(number, str(number)))


def _converter(descriptor: FieldDescriptor, part: MessageCodec[Any, Any] | None) -> Converter:
    """Return the conversion that follows from a field's type. part: codec of its dataclass."""
    nested = descriptor.message_type
    if nested is not None and nested.GetOptions().map_entry:
        convert = _single(nested.fields_by_name["value"], part)
        return _MAP if convert is _UNCHANGED else _mapping(convert)
    convert = _single(descriptor, part)
    if not descriptor.is_repeated:
        return convert
    return _LIST if convert is _UNCHANGED else _sequence(convert)


def _single(descriptor: FieldDescriptor, part: MessageCodec[Any, Any] | None) -> Converter:
    """Return the conversion of one value of a field."""
    nested = descriptor.message_type
    if descriptor.enum_type is not None:
        return enum_converter(descriptor.enum_type)
    if nested is None:
        return _UNCHANGED
    if nested.full_name == Timestamp.DESCRIPTOR.full_name:
        return Converter(_timestamp, lambda stamp: stamp.ToDatetime(UTC))
    if _is_list(nested):
        return _wrapped(nested, part)
    assert part is not None, f"{descriptor.full_name} needs a codec"
    return Converter(part.encode, part.decode)


def _is_list(message: Descriptor) -> bool:
    """Return whether a message only wraps a list, whose absence differs from an empty list."""
    return len(message.fields) == 1 and message.fields[0].is_repeated


def _wrapped(message: Descriptor, part: MessageCodec[Any, Any] | None) -> Converter:
    wrapper, name = GetMessageClass(message), message.fields[0].name
    items = _converter(message.fields[0], part)
    return Converter(
        lambda values: wrapper(**{name: items.encode(values)}),
        lambda wrapped: items.decode(getattr(wrapped, name)),
    )


def _sequence(convert: Converter) -> Converter:
    return Converter(
        lambda values: list(map(convert.encode, values)),
        lambda values: tuple(map(convert.decode, values)),
    )


def _mapping(convert: Converter) -> Converter:
    return Converter(
        lambda values: {key: convert.encode(value) for key, value in values.items()},
        lambda values: {key: convert.decode(value) for key, value in values.items()},
    )


def _timestamp(moment: datetime) -> Timestamp:
    stamp = Timestamp()
    stamp.FromDatetime(moment)
    return stamp


def _default(attribute: Field[Any]) -> Any:
    factory = attribute.default_factory
    return attribute.default if factory is MISSING else factory()


def _bits(descriptor: FieldDescriptor) -> int | None:
    """Return the size of the integers in a field: its own, those of its list, or its map's keys."""
    while (nested := descriptor.message_type) is not None and nested.fields:
        if not (_is_list(nested) or nested.GetOptions().map_entry):
            return None
        descriptor = nested.fields[0]
    return _INTEGER_BITS.get(descriptor.cpp_type)


def _integers(name: str, value: object) -> Iterator[tuple[str, int]]:
    """Return the integers in a value with the names that errors call them by."""
    if isinstance(value, Mapping):
        yield from _integers(f"{name}.keys", tuple(value))
    elif isinstance(value, tuple):
        for index, each in enumerate(value):
            yield from _integers(f"{name}[{index}]", each)
    elif isinstance(value, Integral):
        yield name, int(value)
