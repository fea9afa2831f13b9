"""Addition of counters, field by field."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import reduce
from itertools import starmap, zip_longest
from typing import Any, Self


class Additive:
    """Base of dataclasses of counters: two of the same kind are added field by field.

    Tuples are added by position and mappings by name; either side may have more of them.
    """

    def plus(self, other: Self) -> Self:
        """Return the sum of both."""
        return self._combined(other, operator.add)

    def minus(self, before: Self) -> Self:
        """Return what was counted after the earlier snapshot `before`."""
        return self._combined(before, operator.sub)

    @classmethod
    def sum(cls, counts: Iterable[Self]) -> Self:
        """Return the sum of all."""
        given = tuple(counts)
        return reduce(lambda left, right: left.plus(right), given) if given else cls()

    def _combined(self, other: Self, combine: Callable[[Any, Any], Any]) -> Self:
        names = [each.name for each in fields(self)]  # type: ignore[arg-type]
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in names}
        return type(self)(**{name: _combined(*pair, combine) for name, pair in pairs.items()})


def _combined(left: Any, right: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Return the sum or difference of two values of a field."""
    match left:
        case Additive():
            return left._combined(right, combine)
        case tuple():
            return tuple(starmap(combine, zip_longest(left, right, fillvalue=0)))
        case Mapping():
            names = left.keys() & right.keys()
            both = {name: _combined(left[name], right[name], combine) for name in names}
            return {**left, **right, **both}
        case _:
            return combine(left, right)
