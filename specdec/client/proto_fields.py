"""What protos leave to their readers: which fields were set, and what enum values are called."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from google.protobuf.message import Message


class _Enum(Protocol):
    """The type of an enum, as the generated stubs have it."""

    def Value(self, name: str) -> Any: ...

    def keys(self) -> list[Any]: ...


def present_fields(message: Message, *names: str) -> dict[str, Any]:
    """The fields that the sender has set, by name."""
    return {name: getattr(message, name) for name in names if message.HasField(name)}


class EnumNames:
    """The values of an enum by the names that this service has for them.

    A value is spelled with a prefix and in capitals: `coupled` as `VERIFIER_COUPLED`.
    """

    def __init__(self, enum: _Enum, prefix: str, names: Iterable[str]) -> None:
        """`enum` has a value for each of `names`; that of 0 stands for none of them."""
        self._spellings = {name: f"{prefix}_{name.upper()}" for name in names}
        self._names = {enum.Value(text): name for name, text in self._spellings.items()}

    @classmethod
    def of_all_values(cls, enum: _Enum, prefix: str) -> EnumNames:
        """Return the names of all values except 0."""
        names = (each.removeprefix(f"{prefix}_").lower() for each in enum.keys())  # noqa: SIM118
        return cls(enum, prefix, (name for name in names if name != "unspecified"))

    def spelling(self, name: str) -> str:
        """What a proto calls it."""
        return self._spellings[name]

    def name(self, value: int) -> str | None:
        """What this service calls it; None for a value that it does not know, as 0."""
        return self._names.get(value)

    def given(self, field: str, value: int) -> dict[str, Any]:
        """The field with the value's name; nothing for 0.

        A number that has no name here is handed on, for the type that it becomes to refuse.
        """
        return {field: self.name(value) or value} if value else {}
